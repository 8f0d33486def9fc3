"""Letting messages be recalled: by their words, and by their meaning where a model makes vectors and pgvector is there.

What keeps both is not made by a migration, but where it is asked for.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from pgmemory.errors import ConfigurationError, SchemaError
from pgmemory.pool import Database, Execute
from pgmemory.queries import meaning, security, words
from pgmemory.queries.parts import quoted
from pgmemory.schema.changes import changing, in_schema
from pgmemory.schema.ledger import Search, status, status_within
from pgmemory.schema.protection import treat_new_alike

DEFAULT_LANGUAGE = "english"
_MOST_DIMENSIONS = 16_000  # of pgvector's halfvec


class Model(NamedTuple):
    """What makes vectors.

    Attributes:
        name: Vectors of one name can be compared.
        dimensions: How many numbers each has.
    """

    name: str
    dimensions: int


def make_searchable(database: Database, schema: str, language: str | bool, model: Model | None) -> Search:
    """Let messages be recalled, in one transaction; return by what.

    Where they are indexed by another configuration or model than before, nothing is left of that.

    Args:
        database: Where.
        schema: Its tables must be up to date.
        language: The text search configuration's name; True for the one that is there, or ``english``.
        model: What makes vectors; None to leave them as they are.

    Raises:
        ConfigurationError: There is no such configuration.
        SchemaError: The database's encoding is not UTF-8, pgvector is not there or too old, this role may not change
            the schema, or others held locks on it for too long; nothing was changed.
    """
    if language is False or not isinstance(language, (str, bool)):
        raise ConfigurationError(f"search must be the name of a text search configuration or True, not {language!r}")

    def run() -> None:
        with changing(database, schema) as execute:
            current = status_within(execute, schema)
            wanted, constant = _configuration(execute, language, current.search)
            if has_words := wanted != current.search.language:
                for statement in (words.CREATE_TABLE, words.EMPTY_TABLE, words.CREATE_FUNCTION, words.CREATE_TRIGGERS):
                    execute(_made_in(schema, statement.replace("{language}", constant)))
            if has_vectors := not _fits(current.search, model):
                assert model is not None, "else all vectors fit"
                _make_vectors(execute, schema, model)
            if has_words or has_vectors:
                execute(in_schema(words.MARK_INCOMPLETE, schema))
                treat_new_alike(execute, schema, current)

    current = status(database, schema).search
    is_same = current.language is not None and language in (
        True,
        current.language,
        current.language.removeprefix("pg_catalog."),
    )
    if is_same and _fits(current, model):
        return current
    database.repeat(run, name="make_searchable")
    return status(database, schema).search


def mark_complete(database: Database, schema: str) -> None:
    """Note that all that was stored before is indexed; not where this role may not change the schema."""
    with suppress(SchemaError), changing(database, schema) as execute:
        execute(in_schema(words.MARK_COMPLETE, schema))


def _configuration(execute: Execute, language: str | bool, current: Search) -> tuple[str, str]:
    """Return the whole name of a text search configuration, and the same as an SQL constant."""
    named = current.language or DEFAULT_LANGUAGE if language is True else language
    found = execute(words.FIND_LANGUAGE, {"language": named})
    if not found:
        names = ", ".join(name for (name,) in execute(words.LIST_LANGUAGES))
        raise ConfigurationError(f"search: there is no text search configuration {named!r}; there are {names}")
    ((name, constant, encoding),) = found
    if encoding != "UTF8":
        raise SchemaError(f"recall by words needs a database whose encoding is UTF8, to fold accents; it is {encoding}")
    return name, constant


def _fits(current: Search, model: Model | None) -> bool:
    return model is None or (current.vectors is not None and current.vectors[:2] == model)


def _make_vectors(execute: Execute, schema: str, model: Model) -> None:
    if not 0 < model.dimensions <= _MOST_DIMENSIONS:
        raise ConfigurationError(
            f"embeddings: {model.name} makes vectors of {model.dimensions} numbers; pgvector takes 1 to "
            f"{_MOST_DIMENSIONS}"
        )
    execute(meaning.LOCK_EXTENSION)
    if not execute(meaning.FIND_EXTENSION):
        if not execute(meaning.IS_AVAILABLE):
            raise SchemaError(
                "recall by meaning needs the extension pgvector, which this PostgreSQL server does not have: install "
                "it there, or leave out embeddings= to recall by words alone"
            )
        ((is_public,),) = execute(meaning.MAY_CREATE_IN_PUBLIC)
        execute(meaning.CREATE_EXTENSION.replace("{place}", "public" if is_public else quoted(schema)))
    ((extension_schema, is_new_enough, version),) = execute(meaning.FIND_EXTENSION)
    if not is_new_enough:
        raise SchemaError(
            f"recall by meaning needs pgvector 0.7 or newer, this is {version}: run `alter extension vector update`"
        )
    create = meaning.CREATE_TABLES.replace("{dimensions}", str(model.dimensions))
    ((named,),) = execute(meaning.QUOTE, {"text": model.name})
    for statement in (meaning.DROP_TABLES, create, meaning.CREATE_TRIGGERS):
        made = statement.replace("{model}", named).replace("{vector}", extension_schema)
        execute(_made_in(schema, made))


def _made_in(schema: str, statement: str) -> str:
    return in_schema(security.quoted_functions(statement, schema), schema)

"""The package's layout: who may import whom, where SQL and LangChain may stand, what is documented.

The rules are functions of a module's source text, so that each is tried here on a small bad module too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

import pgmemory
import pgmemory.errors

PROJECT = Path(__file__).resolve().parents[1]
SOURCES = {path.relative_to(PROJECT).as_posix(): path.read_text() for path in sorted(PROJECT.glob("pgmemory/**/*.py"))}

# Each room's floor. A room imports from lower floors only; modules of one folder may import each other.
FLOORS = {
    "__init__": 7,
    "cli": 7,
    "memory": 6,
    "history": 5,
    "transfer": 5,
    "store": 4,
    "schema": 3,
    "formats": 2,
    "names": 2,
    "pool": 2,
    "redaction": 2,
    "rows": 2,
    "said": 3,
    "edits": 3,
    "serialization": 2,
    "_compat": 1,
    "_version": 1,
    "embedded": 2,
    "embedding": 2,
    "encryption": 2,
    "entities": 5,
    "errors": 1,
    "findings": 2,
    "keywords": 1,
    "langgraph_store": 5,
    "logged": 3,
    "models": 1,
    "offline_embeddings": 2,
    "queries": 1,
    "tokens": 2,
    "transcript": 2,
    "token_encodings": 1,
    "turns": 1,
    "workers": 1,
}
DRIVER_ROOM = "pool"
SQL_ROOMS = {"queries", "schema"}
LANGCHAIN_LINE_ROOM = "_compat"
LANGCHAIN_CORE_ROOMS = {
    "_compat",
    "edits",
    "formats",
    "history",
    "logged",
    "memory",
    "offline_embeddings",
    "redaction",
    "said",
    "serialization",
    "transfer",
    "turns",
}
LANGCHAIN_LINES = ("langchain", "langchain_classic", "langchain_community")

_STATEMENT = re.compile(
    r"""(?:^|;) [\s(]* (?P<verb>
    select (?= \s+\d | \s.*\b(?:from|set_config|current_setting|pg_\w+)\b )
    | insert (?= \s+into\s ) | delete (?= \s+from\s ) | update (?= \s.*\bset\s ) | truncate (?= \s+\S+ )
    | with (?= \s.*\bas\s*\( ) | lock (?= \s+table\s ) | set (?= \s+(?:local|session|transaction)\s )
    | (?:create|alter|drop) (?= \s.*\b(?:schema|table|index|view|type|function|role|policy)\s )
    )\b""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


class Import(NamedTuple):
    """One imported name: absolute, dotted, and whether it is imported as soon as the module is."""

    name: str
    line: int
    at_once: bool


def imports(path: str, tree: ast.Module) -> Iterator[Import]:
    """Yield everything a module imports; what only the type checker or a function imports is not "at once"."""
    package = PurePosixPath(path).parent.parts

    def walk(node: ast.AST, at_once: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, at_once)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else ()
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                yield Import(f"{source}.{alias.name}", node.lineno, at_once)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, False)
            for child in node.orelse:
                yield from walk(child, at_once)
        else:
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from walk(child, at_once and not is_function)

    yield from walk(tree, True)


def room_of(path: str) -> str:
    """Return the room a file belongs to: ``pgmemory/memory/base.py`` belongs to ``memory``."""
    return path.split("/")[1].removesuffix(".py")


def is_within(name: str, packages: tuple[str, ...]) -> bool:
    """Tell whether a dotted name is one of the packages or stands below one."""
    return any(name == package or name.startswith(package + ".") for package in packages)


def import_faults(path: str, source: str) -> list[str]:
    """Say which of a module's imports the layout forbids."""
    room = room_of(path)
    faults = []
    if any(part.startswith("langchain") for part in path.split("/")):
        faults.append(f"{path}: LangChain mutes the deprecation warnings of modules named langchain*")
    if room not in FLOORS:
        return [*faults, f"{path}: a new room needs a floor in this test"]
    for name, line, at_once in imports(path, ast.parse(source)):
        where = f"{path}:{line}: imports {name}"
        if is_within(name, ("pgmemory",)):
            target = [*name.split("."), "__init__"][1]
            if target not in FLOORS:
                target = "__init__"  # a public name, from the package itself
            if target != room and FLOORS[target] >= FLOORS[room]:
                faults.append(f"{where}: not from a lower floor")
        if is_within(name, ("psycopg2",)) and room != DRIVER_ROOM:
            faults.append(f"{where}: only {DRIVER_ROOM} knows the driver")
        if is_within(name, LANGCHAIN_LINES) and room != LANGCHAIN_LINE_ROOM:
            faults.append(f"{where}: only {LANGCHAIN_LINE_ROOM} knows which LangChain is there")
        if is_within(name, tuple(f"{line}.agents" for line in LANGCHAIN_LINES)):
            faults.append(f"{where}: importing LangChain's agents warns and is slow")
        if is_within(name, ("langchain_core",)) and at_once and room not in LANGCHAIN_CORE_ROOMS:
            faults.append(f"{where}: this room must be importable without LangChain")
    return faults


def sql_faults(path: str, source: str) -> list[str]:
    """Say which texts of a module, docstrings aside, are SQL statements where none may stand."""
    if room_of(path) in SQL_ROOMS:
        return []
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    faults = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in docstrings:
            continue
        for match in _STATEMENT.finditer(node.value):
            if match["verb"].islower() or match["verb"].isupper():  # prose begins with a capital
                faults.append(f"{path}:{node.lineno}: SQL belongs in queries: {node.value.strip()[:40]!r}")
    return faults


def documentation_faults(path: str, source: str) -> list[str]:
    """Say what lacks a docstring: the module, its public classes and functions, and their public methods."""
    tree = ast.parse(source)
    faults = [] if ast.get_docstring(tree) else [f"{path}: the module says not what it owns"]

    def check(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if not isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) or node.name.startswith("_"):
                continue
            decorators = {ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list}
            if not ast.get_docstring(node) and not decorators & {"overload", "setter"}:
                faults.append(f"{path}:{node.lineno}: {prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                check(node.body, f"{node.name}.")

    check(tree.body, "")
    return faults


@pytest.mark.parametrize("path", SOURCES)
def test_a_module_imports_only_what_its_floor_allows(path: str) -> None:
    assert import_faults(path, SOURCES[path]) == []


@pytest.mark.parametrize("path", SOURCES)
def test_sql_stands_with_the_queries_alone(path: str) -> None:
    assert sql_faults(path, SOURCES[path]) == []


@pytest.mark.parametrize("path", SOURCES)
def test_everything_public_is_documented(path: str) -> None:
    assert documentation_faults(path, SOURCES[path]) == []


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("pgmemory/store.py", "from pgmemory.history import X", "not from a lower floor"),
        ("pgmemory/store.py", "from . import history", "not from a lower floor"),
        ("pgmemory/store.py", "def f():\n    import pgmemory.history", "not from a lower floor"),
        ("pgmemory/history.py", "from pgmemory import ConversationStore", "not from a lower floor"),
        ("pgmemory/pool.py", "from .formats import as_text", "not from a lower floor"),
        ("pgmemory/turns.py", "from pgmemory.models import StoredMessage", "not from a lower floor"),
        ("pgmemory/memory/base.py", "from ..cli import main", "not from a lower floor"),
        ("pgmemory/extra.py", "", "needs a floor"),
        ("pgmemory/store.py", "import psycopg2", "knows the driver"),
        ("pgmemory/store.py", "from psycopg2.pool import PoolError", "knows the driver"),
        ("pgmemory/memory/base.py", "from langchain.memory import X", "knows which LangChain"),
        ("pgmemory/history.py", "import langchain_community", "knows which LangChain"),
        ("pgmemory/_compat.py", "from langchain_classic import agents", "LangChain's agents"),
        ("pgmemory/_compat.py", "from langchain.agents.agent import AgentExecutor", "LangChain's agents"),
        ("pgmemory/store.py", "from langchain_core.messages import BaseMessage", "without LangChain"),
        ("pgmemory/langchain_parts.py", "", "mutes the deprecation warnings"),
        ("pgmemory/memory/langchain.py", "", "mutes the deprecation warnings"),
    ],
)
def test_a_forbidden_import_is_found(path: str, source: str, fault: str) -> None:
    assert any(fault in found for found in import_faults(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("pgmemory/store.py", "from pgmemory import queries, schema"),
        ("pgmemory/memory/buffer.py", "from .base import X\nfrom pgmemory.memory import base\nfrom ..history import Y"),
        ("pgmemory/cli.py", "from pgmemory._version import __version__"),
        ("pgmemory/_compat.py", "from langchain_classic.base_memory import BaseMemory"),
        ("pgmemory/memory/base.py", "from langchain_core.agents import AgentAction"),
        ("pgmemory/store.py", "def f():\n    from langchain_core.messages import BaseMessage"),
        ("pgmemory/store.py", "if TYPE_CHECKING:\n    from langchain_core.messages import BaseMessage"),
    ],
)
def test_an_allowed_import_is_let_through(path: str, source: str) -> None:
    assert import_faults(path, source) == []


@pytest.mark.parametrize(
    "text",
    [
        "select content from messages",
        "SELECT 1",
        "begin; select set_config('a', 'b', true)",
        "\n  insert into t values (1)",
        "UPDATE t AS x SET a = 1",
        "delete from t",
        "with recursive w as (select 1) select * from w",
        "create unique index i on t (a)",
        "set transaction isolation level read committed",
    ],
)
def test_sql_in_the_wrong_room_is_found(text: str) -> None:
    assert sql_faults("pgmemory/store.py", f"def f(c):\n    c.execute({text!r})")
    assert sql_faults("pgmemory/store.py", f"def f(c, s):\n    c.execute(f{text + ' {s}'!r})")
    assert not sql_faults("pgmemory/queries.py", f"QUERY = {text!r}")


@pytest.mark.parametrize(
    "text", ["Select turns from the log.", "Delete from the log", "update", "set up the schema first"]
)
def test_prose_and_docstrings_are_not_taken_for_sql(text: str) -> None:
    assert not sql_faults("pgmemory/store.py", f"help = {text!r}")
    assert not sql_faults("pgmemory/store.py", f"def f():\n    'select content from messages: {text}'")


@pytest.mark.parametrize(
    ("source", "lacking"),
    [
        ("x = 1", "the module"),
        ("'m'\ndef f(): ...", "f has no docstring"),
        ("'m'\nasync def f(): ...", "f has no docstring"),
        ("'m'\nclass A: ...", "A has no docstring"),
        ("'m'\nclass A:\n    'a'\n    def f(self): ...", "A.f has no docstring"),
    ],
)
def test_a_missing_docstring_is_found(source: str, lacking: str) -> None:
    assert [lacking in fault for fault in documentation_faults("pgmemory/store.py", source)] == [True]


@pytest.mark.parametrize(
    "source", ["def _f(): ...", "class _A:\n    def f(self): ...", "class A:\n    'a'\n    def __len__(self): ..."]
)
def test_what_is_private_needs_no_docstring(source: str) -> None:
    assert documentation_faults("pgmemory/store.py", f"'m'\n{source}") == []


@pytest.mark.parametrize("module", ["pgmemory", "pgmemory.cli"])
def test_a_module_is_imported_without_importing_langchain(module: str) -> None:
    code = f"import sys, {module}; print([name for name in sys.modules if name.startswith('langchain')])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True)
    assert (loaded.stdout.strip(), loaded.stderr) == ("[]", "")


def test_the_public_names_are_sorted_and_can_be_imported() -> None:
    assert pgmemory.__all__ == sorted(set(pgmemory.__all__))
    assert [name for name in pgmemory.__all__ if not hasattr(pgmemory, name)] == []


def test_the_public_names_are_complete() -> None:
    root = "pgmemory/__init__.py"
    imported = {name.rpartition(".")[2] for name, _, _ in imports(root, ast.parse(SOURCES[root])) if "pgmemory" in name}
    errors = {name for name, value in vars(pgmemory.errors).items() if isinstance(value, type)}
    assert {name for name in imported | errors if not name.startswith("_")} - set(pgmemory.__all__) == set()

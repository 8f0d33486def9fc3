"""Recall: the turns of a user's past that matter for a text; and the words of messages, by which they are found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from pgmemory import schema
from pgmemory.encryption import Opener
from pgmemory.errors import ConfigurationError, EncryptionError, SchemaError
from pgmemory.models import AFTER_ALL, BEFORE_AGENT, ConversationKey, StoredMessage, Window, readable
from pgmemory.pool import Execute, StoreError
from pgmemory.queries import meaning, recall, words
from pgmemory.queries.parts import READ_COMMITTED, only_noting_seals
from pgmemory.rows import names_of, to_message, to_window
from pgmemory.store.base import FIRST_ID
from pgmemory.store.encryption import EncryptionOperations, notes_seals
from pgmemory.store.meaning import MeaningOperations

_logger = logging.getLogger(__name__)

RecallBy = Literal["words", "meaning", "both"]
_PART = 4  # which column of RECALL's rows says what a row is
# data_exception, syntax_error_or_access_rule_violation
_NOT_AS_EXPECTED = ("22", "42")
_IDS = 1000
# One transaction indexes about so many messages: it keeps the writers of their conversations waiting for less than a
# second.
_BATCH_MESSAGES = 2000
_STATEMENT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class RecallHit:
    """A message that matters.

    Attributes:
        session_id: Its conversation's name.
        message_index: Its number in the conversation.
        score: How much it matters, compared with others of the same recall.
    """

    session_id: str
    message_index: int
    score: float


@dataclass(frozen=True, slots=True)
class RecalledTurn:
    """A whole turn in which messages stand that matter.

    Attributes:
        session_id: Its conversation's name.
        messages: Its messages, oldest first.
        hits: Those that matter, the one that matters most first.
    """

    session_id: str
    messages: tuple[StoredMessage, ...]
    hits: tuple[RecallHit, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """What was recalled for a text, and the window that it was asked for with.

    Attributes:
        turns: The turns that matter, the one that matters most first.
        window: The newest turns of the conversation, and the preamble's system messages.
    """

    turns: tuple[RecalledTurn, ...]
    window: Window


class RecallOperations(EncryptionOperations, MeaningOperations):
    """What finds a user's past again."""

    def recall(
        self,
        key: ConversationKey,
        text: str,
        *,
        k: int = 10,
        by: RecallBy | None = None,
        whole_user: bool = True,
        turns: int = 0,
        before: int = AFTER_ALL,
    ) -> Recall:
        """Return the whole turns in which the `k` messages stand that matter most for a text, and the newest turns.

        By words, messages are ranked by BM25 over what the human and the AI said, with how many of the user's own
        messages have each word; those that share no word with the text are not looked at. By meaning, they are ranked
        by the cosine similarity of their vectors, where it is above the mean of the 500 nearest. By both, either
        score is taken as a share of the best one, and they are added up. A message also gets a third of the score of
        those before and after it. Of equal ones the newer comes first. One round trip, after one question to the
        embedder.

        Args:
            key: The conversation that asks.
            text: What it asks for; without a word there is nothing to recall.
            k: How many messages; several of them may stand in one turn.
            by: How they are found: by their ``"words"``, their ``"meaning"`` or ``"both"``. None for both where the
                store has embeddings and the schema vectors of the same model, else for words. When the embedder fails
                they are found by words, and a warning is logged.
            whole_user: Recall from all conversations of its user, the logs that agents keep beside others aside; else,
                and without a user, from this one alone.
            turns: How many of the conversation's newest turns to return as `window`; they are not recalled.
            before: Read and recall of the conversation only what stands before this message.

        Raises:
            SchemaError: Messages cannot be recalled so: `setup` was never called with ``search``, or not by a store
                with the same embeddings.
            EncryptionError: The store encrypts, and so keeps neither words nor vectors.
            ConfigurationError: `k`, `by` or `text` is none, or the store has no embeddings.
        """
        if type(k) is not int or not 0 <= k < 2**31:
            raise ConfigurationError(f"k must be a whole number from 0, not {k!r}")
        if not isinstance(text, str):
            raise ConfigurationError(f"text must be text, not {type(text).__name__}")
        if self.keyring is not None:
            raise EncryptionError(
                "an encrypted conversation cannot be recalled by its words, which would have to be kept beside it: "
                "recall with a store that has no keyring"
            )
        self._require_search()
        statement, vector = self._way_to_recall(text, by)
        parameters = names_of(self._own(key)) | {
            "text": readable(text),
            "embedding": vector,
            "model": self.embedder and self.embedder.name,
            "k": k,
            "whole_user": whole_user,
            "turns": turns,
            "before": before,
            "before_agent": BEFORE_AGENT,
        }
        try:
            rows = self._recall(statement, parameters)
        except StoreError as error:
            # Such as no right to use pgvector's schema: no turn fails for what recall by words does without.
            if vector is None or (error.sqlstate or "")[:2] not in _NOT_AS_EXPECTED:
                raise
            _logger.warning("messages are recalled by their words alone: %s", error)
            rows = self._recall(recall.RECALL_BY_WORDS, parameters)
        with self._opener(f"session {key.session_id!r}") as opener:
            window = to_window([columns for _, _, _, _, *columns in rows if columns[0] != recall.PART_RECALLED], opener)
            return Recall(tuple(_turns_in(rows, opener)), window)

    def _recall(self, statement: str, parameters: dict[str, Any]) -> list[tuple[Any, ...]]:
        rows = self._execute("recall", only_noting_seals(statement), parameters)
        if notes_seals([row for row in rows if row[_PART] != recall.PART_RECALLED]):
            return self._execute("recall", statement, parameters)
        return rows

    def _way_to_recall(self, text: str, by: RecallBy | None) -> tuple[str, str | None]:
        """Return the statement that recalls, and the vector of the text if it takes one."""
        if by is not None and by not in get_args(RecallBy):
            raise ConfigurationError(f"by must be one of {get_args(RecallBy)} or None, not {by!r}")
        asked = None if by == "words" else self._vector_of(text, is_needed=by is not None)
        if asked is None:
            return recall.RECALL_BY_WORDS, None
        vector, extension_schema = asked
        statement = recall.RECALL_BY_MEANING if by == "meaning" else recall.RECALL_BY_BOTH
        return meaning.in_extension(statement, extension_schema), vector

    def index_messages(
        self, *, all_tenants: bool = False, on_batch: Callable[[int], object] | None = None
    ) -> int:
        """Index what is stored in clear text and is not indexed yet, and make the vectors that wait to be made.

        What is written is indexed at once, and embedded soon: this is for what was stored before `setup` was called
        with ``search``, if that has ended early, and for waiting until all has its vector but what another process is
        embedding at this moment. It also makes the vectors of items. In batches, each a transaction of its own, beside
        writers that go on; if it ends early, another call goes on.

        Args:
            all_tenants: What every tenant has stored, not only the store's; but vectors are made of its own alone.
            on_batch: Called after each batch with how many messages were indexed so far.

        Returns:
            How many messages were indexed by their words; those without any word are not counted.

        Raises:
            SchemaError: `setup` was never called with ``search``.
            EmbeddingError: The embedder failed; what it has made before is stored.
            StoreError: Row-level security keeps other tenants' rows from this role.
        """
        self._require_search()
        indexed = self._index(self._scope(all_tenants), on_batch)
        # Behind what is being made: it waits for that, too.
        self._embedding_workers.call(self._embed_all)
        return indexed

    def _index(self, tenant_id: str | None, on_batch: Callable[[int], object] | None = None) -> int:
        """Index what is not indexed yet by its words, and let wait what has no vector."""
        statement = words.INDEX_BATCH
        if self._search.vectors is not None:
            self._queue_items(tenant_id)
            statement = meaning.ENQUEUE_BATCH + statement.removeprefix(READ_COMMITTED)
        indexed = 0
        for batch in self._batches_to_index(tenant_id):
            index = partial(_index_batch, statement, batch)
            indexed += self._transact("index_messages", index, seconds=_STATEMENT_SECONDS)
            if on_batch is not None:
                on_batch(indexed)
        return indexed

    def _batches_to_index(self, tenant_id: str | None) -> Iterator[dict[str, Any]]:
        """Yield the parameters of `_index`: several short conversations, or a part of a long one."""
        after = FIRST_ID
        while rows := self._execute(
            "read_ids", words.READ_IDS_TO_INDEX, {"tenant_id": tenant_id, "after": after, "limit": _IDS}
        ):
            after = rows[-1][0]
            ids: list[str] = []
            messages = 0
            for id, numbers in rows:
                if numbers > _BATCH_MESSAGES:
                    for first in range(0, numbers, _BATCH_MESSAGES):
                        yield {"ids": [id], "first": first, "end": first + _BATCH_MESSAGES}
                    continue
                if messages + numbers > _BATCH_MESSAGES:
                    yield {"ids": ids, "first": 0, "end": AFTER_ALL}
                    ids, messages = [], 0
                ids.append(id)
                messages += numbers
            if ids:
                yield {"ids": ids, "first": 0, "end": AFTER_ALL}

    def _index_after_setup(self) -> None:
        if not self._search.is_complete:
            try:
                tenant_id = self._scope(all_tenants=True)
            except StoreError:
                tenant_id = self.tenant_id  # row-level security keeps the others' rows from this role
            self._index(tenant_id)
            if tenant_id is None:
                schema.mark_complete(self._database, self.schema)
        self._embed_soon()
        self._embed_soon(meaning.ITEMS)

    def _require_search(self) -> None:
        with self._fitting_schema():
            if self._search.language is None:
                # It may have been made meanwhile.
                self._check_schema()
        if self._search.language is None:
            raise SchemaError(
                f"messages cannot be recalled in the schema {self.schema!r}, for their words were never indexed: run "
                "`pgmemory init --search` or call store.setup(search=True)"
            )


def _index_batch(statement: str, batch: dict[str, Any], execute: Execute) -> int:
    ((count,),) = execute(statement, batch)
    return int(count)


def _turns_in(rows: Sequence[Sequence[Any]], opener: Opener) -> Iterator[RecalledTurn]:
    """Yield the recalled turns in the rows of RECALL, which have them in order of their rank.

    A turn of which something is encrypted is left out: a conversation may go on encrypted that began in clear text.
    """
    turns: dict[int, tuple[Sequence[Any], list[StoredMessage]]] = {}
    recalled = [row for row in rows if row[_PART] == recall.PART_RECALLED]
    sealed = {row[1] for row in recalled if row[-1] is not None}
    for row in (row for row in recalled if row[1] not in sealed):
        session_id, rank, hits, scores, _, _, *columns = row
        turns.setdefault(rank, ((session_id, hits, scores), []))[1].append(to_message(columns, opener))
    for (session_id, hits, scores), messages in turns.values():
        yield RecalledTurn(session_id, tuple(messages), tuple(map(RecallHit, [session_id] * len(hits), hits, scores)))

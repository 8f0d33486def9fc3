"""Making the vectors by which messages and items are found: after the commit, in batches, once for a text."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta
from typing import Any

from pgmemory import schema
from pgmemory.errors import ConfigurationError, EmbeddingError, PgMemoryError, SchemaError
from pgmemory.queries import meaning
from pgmemory.queries.meaning import Queue
from pgmemory.store.base import FIRST_ID, StoreBase

_logger = logging.getLogger(__name__)

_BATCH = 64  # texts that the embedder is given at once
# After so long a process that began to make a vector is taken for dead.
_LAPSE = timedelta(minutes=5)
# So many single texts in a row must fail for the embedder, and not a text, to be at fault.
_FAILURES = 3
# One transaction queues the texts of so many items: large ones keep no writer waiting for long.
_ITEMS_AT_ONCE = 200


class MeaningOperations(StoreBase):
    """What asks the store's embedder."""

    def _vectors(self) -> schema.Vectors | None:
        """Return how the schema keeps vectors, if this store's embedder makes them; else None."""
        vectors = self._search.vectors
        return vectors if vectors and self.embedder and vectors.model == self.embedder.name else None

    def _vector_of(self, text: str, *, is_needed: bool) -> tuple[str, str] | None:
        """Return the vector of what is looked for, and the quoted schema of pgvector; None to go by words alone.

        Asks the embedder. None where the schema has no vectors of its model, for a text without a word, and where it
        fails, which is logged.

        Args:
            text: What is looked for.
            is_needed: Whether it is an error that the schema has no such vectors.

        Raises:
            ConfigurationError: They are needed, and the store has no embeddings.
            SchemaError: They are needed, and there are none.
        """
        with self._fitting_schema():
            vectors = self._vectors()
            if is_needed and vectors is None and self.embedder is not None:
                # They may have been made meanwhile.
                self._check_schema()
                vectors = self._vectors()
        if is_needed and vectors is None:
            self._refuse_meaning()
        if vectors is None or self.embedder is None or not text.strip():
            return None
        try:
            return self.embedder.of_query(text, vectors.dimensions), vectors.extension_schema
        except EmbeddingError as error:
            _logger.warning("what is looked for is found by its words alone: %s", error)
            return None

    def _refuse_meaning(self) -> None:
        if self.embedder is None:
            raise ConfigurationError("finding by meaning needs embeddings: ConversationStore(..., embeddings=...)")
        made_by = self._search.vectors and self._search.vectors.model
        there_are = f"there are vectors of {made_by!r}, not of" if made_by else "there are no vectors of"
        raise SchemaError(
            f"nothing can be found by its meaning in the schema {self.schema!r}: {there_are} {self.embedder.name!r}: "
            "call store.setup(search=True), which makes them anew"
        )

    def _embed_soon(self, queue: Queue = meaning.MESSAGES) -> None:
        """Make the vectors that wait to be made, in a thread of their own; a failure of that is logged."""
        if self._vectors() is not None:
            self._embeds = True
            self._embedding_workers.start(self._embed_waiting, queue)

    def _embed_waiting(self, queue: Queue) -> None:
        try:
            # At its end the interpreter waits for this thread: for a batch, not for all of them.
            while self._embeds and threading.main_thread().is_alive() and self._embed_batch(queue):
                pass
        except PgMemoryError as error:
            _logger.warning("%s cannot be found by their meaning yet, for no vector was made: %s", queue.name, error)

    def _embed_all(self) -> None:
        last: EmbeddingError | None = None
        for queue in (meaning.MESSAGES, meaning.ITEMS):
            try:
                while self._embed_batch(queue):
                    pass
            except EmbeddingError as error:  # of texts that it does not take; those of the other kind go on
                last = error
        if last is not None:
            raise last

    def _queue_items(self, tenant_id: str | None) -> None:
        """Let the texts of items that have no vectors wait for them, in batches, each a transaction of its own.

        Args:
            tenant_id: Whose items; None for all.
        """
        last: tuple[Any, ...] = ("", FIRST_ID, [], "")
        while True:
            after = dict(zip(("after_tenant", "after_owner", "after_namespace", "after_key"), last, strict=True))
            parameters = after | {"tenant_id": tenant_id, "limit": _ITEMS_AT_ONCE}
            rows = self._execute("queue_items", meaning.ENQUEUE_ITEMS, parameters)
            if not rows:
                return
            (last,) = rows

    def _embed_batch(self, queue: Queue) -> bool:
        """Make the vectors of some texts that wait for them; return whether more may wait.

        The embedder is asked outside of any transaction. Two round trips; one if there is nothing to ask it.

        Raises:
            EmbeddingError: It failed; what waits goes on waiting.
        """
        vectors = self._vectors()
        if vectors is None:
            return False
        parameters = {"lock": f"pgmemory vectors {self.schema} {self.tenant_id}", "lapse": _LAPSE, "limit": _BATCH}
        own = {"tenant_id": self.tenant_id, "model": vectors.model}
        claimed = self._execute("claim_texts", queue.claim, own | parameters)
        texts = {bytes(text_hash): text for text_hash, is_known, text in claimed if not is_known}
        if texts:
            self._embed(queue, vectors, texts)
        # Also what was stored in the meantime may have found these claimed: so until nothing can be.
        return bool(claimed)

    def _embed(self, queue: Queue, vectors: schema.Vectors, texts: dict[bytes, str]) -> None:
        """Make and store the vectors of claimed texts, by their hashes; give back those that could not be made."""
        made, failed, error = self._ask(vectors, texts)
        own = {"tenant_id": self.tenant_id, "model": vectors.model}
        if made:
            parameters = own | {"hashes": [*made], "embeddings": [*made.values()]}
            self._execute("store_vectors", meaning.in_extension(queue.store, vectors.extension_schema), parameters)
        if error is not None:
            left = [text_hash for text_hash in texts if text_hash not in made]
            self._execute("release_texts", queue.release, own | {"hashes": left, "failed": failed})
            if not made:
                raise error
            _logger.warning("%d %s cannot be found by their meaning yet: %s", len(left), queue.name, error)

    def _ask(
        self, vectors: schema.Vectors, texts: dict[bytes, str]
    ) -> tuple[dict[bytes, str], list[bytes], EmbeddingError | None]:
        """Return the vectors of texts as far as they can be made, for which the embedder failed, and why."""
        assert self.embedder is not None, "the texts were claimed for it"
        try:
            whole = self.embedder.of_texts([*texts.values()], vectors.dimensions)
            return dict(zip(texts, whole, strict=True)), [], None
        except EmbeddingError as error:
            last = error
        made: dict[bytes, str] = {}
        failed = [*texts] if len(texts) == 1 else []
        failures = 0
        # It may be one text that the embedder does not take: the others must not wait for that one.
        for text_hash, text in texts.items() if len(texts) > 1 else ():
            try:
                made[text_hash] = self.embedder.of_texts([text], vectors.dimensions)[0]
                failures = 0
            except EmbeddingError as error:
                last = error
                failed.append(text_hash)
                failures += 1
                if failures == _FAILURES:
                    break
        return made, failed, last

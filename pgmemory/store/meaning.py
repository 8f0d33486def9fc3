"""Making the vectors by which messages are recalled by their meaning: after the commit, in batches, once for a text."""

from __future__ import annotations

import logging
import threading
from datetime import timedelta

from pgmemory import schema
from pgmemory.errors import EmbeddingError, PgMemoryError
from pgmemory.queries import meaning
from pgmemory.store.base import StoreBase

_logger = logging.getLogger(__name__)

_BATCH = 64  # texts that the embedder is given at once
# After so long a process that began to make a vector is taken for dead.
_LAPSE = timedelta(minutes=5)
# So many single texts in a row must fail for the embedder, and not a text, to be at fault.
_FAILURES = 3


class MeaningOperations(StoreBase):
    """What asks the store's embedder."""

    def _vectors(self) -> schema.Vectors | None:
        """Return how the schema keeps vectors, if this store's embedder makes them; else None."""
        vectors = self._search.vectors
        return vectors if vectors and self.embedder and vectors.model == self.embedder.name else None

    def _embed_soon(self) -> None:
        """Make the vectors that wait to be made, in a thread of their own; a failure of that is logged."""
        if self._vectors() is not None:
            self._embeds = True
            self._embedding_workers.start(self._embed_waiting)

    def _embed_waiting(self) -> None:
        try:
            # At its end the interpreter waits for this thread: for a batch, not for all of them.
            while self._embeds and threading.main_thread().is_alive() and self._embed_batch():
                pass
        except PgMemoryError as error:
            _logger.warning("messages cannot be recalled by their meaning yet, for no vector was made: %s", error)

    def _embed_all(self) -> None:
        while self._embed_batch():
            pass

    def _embed_batch(self) -> bool:
        """Make the vectors of some messages that wait for them; return whether more may wait.

        The embedder is asked outside of any transaction. Two round trips; one if there is nothing to ask it.

        Raises:
            EmbeddingError: It failed; what waits goes on waiting.
        """
        vectors = self._vectors()
        if vectors is None:
            return False
        parameters = {"lock": f"pgmemory vectors {self.schema} {self.tenant_id}", "lapse": _LAPSE, "limit": _BATCH}
        claimed = self._execute("claim_texts", meaning.CLAIM, {"tenant_id": self.tenant_id} | parameters)
        texts = {bytes(text_hash): text for text_hash, is_known, text in claimed if not is_known}
        if texts:
            self._embed(vectors, texts)
        return len(claimed) == _BATCH

    def _embed(self, vectors: schema.Vectors, texts: dict[bytes, str]) -> None:
        """Make and store the vectors of claimed texts, by their hashes; give back those that could not be made."""
        made, error = self._ask(vectors, texts)
        if made:
            parameters = {"hashes": [*made], "embeddings": [*made.values()], "tenant_id": self.tenant_id}
            self._execute("store_vectors", meaning.in_extension(meaning.STORE, vectors.extension_schema), parameters)
        if error is not None:
            failed = [text_hash for text_hash in texts if text_hash not in made]
            self._execute("release_texts", meaning.RELEASE, {"hashes": failed, "tenant_id": self.tenant_id})
            if not made:
                raise error
            _logger.warning("%d messages cannot be recalled by their meaning yet: %s", len(failed), error)

    def _ask(
        self, vectors: schema.Vectors, texts: dict[bytes, str]
    ) -> tuple[dict[bytes, str], EmbeddingError | None]:
        """Return the vectors of texts as far as they can be made, and why the others cannot."""
        assert self.embedder is not None, "the texts were claimed for it"
        try:
            return dict(zip(texts, self.embedder.of_texts([*texts.values()], vectors.dimensions), strict=True)), None
        except EmbeddingError as error:
            last = error
        made: dict[bytes, str] = {}
        failures = 0
        # It may be one text that the embedder does not take: the others must not wait for that one.
        for text_hash, text in texts.items() if len(texts) > 1 else ():
            try:
                made[text_hash] = self.embedder.of_texts([text], vectors.dimensions)[0]
                failures = 0
            except EmbeddingError as error:
                last = error
                failures += 1
                if failures == _FAILURES:
                    break
        return made, last

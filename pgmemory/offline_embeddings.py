"""Embeddings that need no key and no network: for recall by meaning in tests, in examples and where nothing may go out.

Needs the extra ``vector``; nothing else of pgmemory imports this.
"""

from __future__ import annotations

from pathlib import Path

from langchain_core.embeddings import Embeddings

try:
    import wordllama
    from wordllama import WordLlama
except ImportError as error:
    raise ImportError(
        f"OfflineEmbeddings needs wordllama, which does not work here ({error}): "
        'pip install "langchain-pgmemory[vector]"'
    ) from error


class OfflineEmbeddings(Embeddings):
    """Vectors of 256 numbers from the static embeddings that come with wordllama, mostly for English.

    The mean of a text's tokens: about the words that mean alike, nothing of their order. A larger model finds more.
    Loading takes about a second, a text some ten microseconds.
    """

    model = "l2_supercat_256"

    def __init__(self) -> None:
        # The weights are in the package, but looked for in a cache that would be filled by download.
        self._model = WordLlama.load(cache_dir=Path(wordllama.__file__).parent, disable_download=True)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return a vector for each text."""
        vectors: list[list[float]] = self._model.embed(texts).tolist() if texts else []
        return vectors

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a text that is searched for."""
        return self.embed_documents([text])[0]

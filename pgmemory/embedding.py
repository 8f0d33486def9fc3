"""Vectors of texts: asking an embedder of LangChain's kind, in a form that pgvector takes.

This module knows nothing of databases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pgmemory.errors import ConfigurationError, EmbeddingError

if TYPE_CHECKING:
    from langchain_core.embeddings import Embeddings

# Under these names LangChain's embedders say which model they ask.
_MODEL_NAMES = ("model", "model_name", "model_id", "deployment")


class Embedder:
    """What makes vectors of texts.

    Args:
        embeddings: LangChain's ``Embeddings``, or what has its two methods.

    Raises:
        ConfigurationError: It has not.
    """

    def __init__(self, embeddings: Embeddings) -> None:
        for method in ("embed_documents", "embed_query"):
            if not callable(getattr(embeddings, method, None)):
                raise ConfigurationError(
                    f"embeddings must be Embeddings of LangChain or None; a {type(embeddings).__name__} has no "
                    f"{method}()"
                )
        self._embeddings = embeddings
        named = (getattr(embeddings, name, None) for name in _MODEL_NAMES)
        model = next((name for name in named if isinstance(name, str) and name), "")
        self.name = f"{type(embeddings).__name__} {model}".strip()
        """What tells vectors apart that cannot be compared: the embedder's class and model."""

    def dimensions(self) -> int:
        """Return how many numbers a vector has, by making one.

        Raises:
            EmbeddingError: The embedder failed.
        """
        return len(_numbers(self._ask("embed_query", "text"), None))

    def of_query(self, text: str, dimensions: int) -> str:
        """Return the vector of what is searched for.

        Raises:
            EmbeddingError: The embedder failed, or its vector has other dimensions or no direction.
        """
        numbers = _numbers(self._ask("embed_query", text), dimensions)
        if not any(numbers):
            raise EmbeddingError(f"{self.name} has made a vector of zeros, to which all are equally near")
        return _as_text(numbers)

    def of_texts(self, texts: Sequence[str], dimensions: int) -> list[str]:
        """Return the vectors of what is to be found.

        Raises:
            EmbeddingError: The embedder failed, or has made too few or other vectors.
        """
        vectors = self._ask("embed_documents", list(texts))
        # Some return an array of numpy's for a list.
        if not hasattr(vectors, "__len__") or len(vectors) != len(texts):
            raise EmbeddingError(f"{self.name} has not made one vector for each of {len(texts)} texts")
        return [_as_text(_numbers(vector, dimensions)) for vector in vectors]

    def _ask(self, method: str, given: Any) -> Any:
        try:
            return getattr(self._embeddings, method)(given)
        except Exception as error:
            # Not what it says: it may hold a key, or what was said.
            raise EmbeddingError(f"{self.name} failed with {type(error).__name__}") from None


def _numbers(vector: Any, dimensions: int | None) -> list[float]:
    try:
        numbers = [float(number) for number in vector]
    except (TypeError, ValueError):
        raise EmbeddingError(f"the embedder returned a {type(vector).__name__} for a vector of numbers") from None
    if not numbers or not all(map(math.isfinite, numbers)):
        raise EmbeddingError("the embedder returned a vector without numbers, or with some that are not finite")
    if dimensions is not None and len(numbers) != dimensions:
        raise EmbeddingError(f"the embedder returned a vector of {len(numbers)} numbers, not {dimensions}")
    return numbers


def _as_text(numbers: Sequence[float]) -> str:
    # Of length 1, so that no number is beyond what half precision holds; directions alone are compared. Five digits
    # are more than it keeps.
    greatest = max(map(abs, numbers)) or 1.0  # whose square may be beyond what a float holds
    scaled = [number / greatest for number in numbers]
    length = math.hypot(*scaled) or 1.0
    return f"[{','.join(f'{number / length:.5g}' for number in scaled)}]"

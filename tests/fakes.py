"""Stand-ins for models of language, the only thing that tests do not run for real."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from pydantic import Field, PrivateAttr


class FakeChat(BaseChatModel):
    """A chat model that answers with a function of the messages and notes every call.

    Attributes:
        answer: Returns the answer, a message or its text; may raise or wait.
    """

    answer: Callable[[list[BaseMessage]], AIMessage | str] = Field(exclude=True)
    _calls: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def calls(self) -> list[list[BaseMessage]]:
        """The messages of each call so far."""
        return self._calls

    @property
    def prompts(self) -> list[str]:
        """The text of each call so far."""
        return ["\n".join(str(message.content) for message in call) for call in self._calls]

    @property
    def _llm_type(self) -> str:
        return "fake"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, Any]:
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self._calls.append(messages)
        answer = self.answer(messages)
        message = AIMessage(content=answer) if isinstance(answer, str) else answer
        return ChatResult(generations=[ChatGeneration(message=message)])


def scripted(*answers: AIMessage | str | Exception) -> FakeChat:
    """Return a model that gives these answers in turn, and the last one from then on; an exception is raised."""
    remaining = list(answers)

    def answer(messages: list[BaseMessage]) -> AIMessage | str:
        given = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        if isinstance(given, Exception):
            raise given
        return given

    return FakeChat(answer=answer)


_CONCEPTS = ({"dog", "puppy", "hound"}, {"car", "vehicle", "engine"}, {"parcel", "package", "delivery"})


class FakeEmbeddings(Embeddings):
    """Embeddings whose vectors count the words of a few concepts, and that note every text that they are given.

    Attributes:
        model: Its name.
        batches: The texts of each call so far, in order; those of questions aside.
        before: Called before each call with its texts; may raise or wait.
    """

    def __init__(self, model: str = "concepts", before: Callable[[list[str]], object] = lambda texts: None) -> None:
        self.model = model
        self.before = before
        self.batches: list[list[str]] = []

    @property
    def texts(self) -> list[str]:
        """All texts so far, in order; those of questions aside."""
        return [text for batch in self.batches for text in batch]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.batches.append(texts)
        self.before(texts)
        return [self._vector(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self.before([text])
        return self._vector(text)

    def _vector(self, text: str) -> list[float]:
        words = re.findall(r"\w+", text.lower())
        return [float(sum(word.rstrip("s") in concept for word in words)) for concept in _CONCEPTS] + [0.1]

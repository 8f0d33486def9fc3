"""A stand-in for a language model that counts a word as a token and notes what it is asked."""

from __future__ import annotations

from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from pydantic import PrivateAttr


class StandIn(BaseChatModel):
    """A chat model that always answers the same number of words.

    Attributes:
        words: How many.
    """

    words: int = 100
    _prompts: list[int] = PrivateAttr(default_factory=list)

    @property
    def prompts(self) -> list[int]:
        """The words of each prompt so far."""
        return self._prompts

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Any = None) -> int:
        """Count the words of messages."""
        return sum(len(str(message.content).split()) for message in messages)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        self._prompts.append(self.get_num_tokens_from_messages(messages))
        answer = " ".join(["word"] * self.words)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])

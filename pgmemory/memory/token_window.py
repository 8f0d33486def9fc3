"""The most whole turns, newest first, that fit a token limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage
from pydantic import Field, model_validator
from typing_extensions import Self

from pgmemory.memory.selection import Selection, Verdict
from pgmemory.memory.token_limit import TokenLimit, TokenLimitMemory, system_of, validated_limit
from pgmemory.turns import LoggedMessage, Turn


class TokenWindowMemory(TokenLimitMemory):
    """Show the most whole turns, newest first, that fit the limit together with the preamble's system messages.

    Attributes:
        max_token_limit: The limit for all that is loaded, as messages, or a function of the chain's inputs that
            returns it. A limit of 0, a newest turn larger than the limit, or system messages larger than it, give a
            window without turns.
        llm: A language model to count with, as LangChain's token buffer has it; `token_counter` comes first.
    """

    max_token_limit: TokenLimit = 2000
    # Not BaseLanguageModel[Any]: pydantic would make a class of it that no model is an instance of.
    llm: BaseLanguageModel | None = Field(default=None, exclude=True, repr=False)  # type: ignore[type-arg]

    @model_validator(mode="after")
    def _check_limit(self) -> Self:
        if not callable(self.max_token_limit):
            validated_limit(self.max_token_limit, {})
        return self

    def _select(self, inputs: dict[str, Any]) -> Selection:
        """Return the newest turns within the limit. One round trip, where messages were counted when stored."""
        limit = validated_limit(self.max_token_limit, inputs)
        if limit == 0:
            return Selection([], [], limit)
        key, encoding = self.chat_memory.key, self._counter.encoding
        pages = self._pages(
            lambda budget, before: self._store.read_last_tokens(key, budget=budget, encoding=encoding, before=before),
            limit,
        )
        return self._newest_turns(pages, head_of=system_of, limit=limit)

    def _verdict_on_head(self, system: Sequence[LoggedMessage], selection: Selection) -> Verdict:
        if selection.limit == 0:
            return Verdict("beyond_limit", "The limit is 0, which shows nothing.")
        return super()._verdict_on_head(system, selection)

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        return self._verdicts_by_limit(turns, selection)

    def _settings(self, selection: Selection) -> dict[str, Any]:
        return {"max_token_limit": selection.limit}

    def _counting_llm(self) -> BaseLanguageModel[Any] | None:
        return self.llm

    def _save_turn(self, messages: list[BaseMessage]) -> None:
        self._append(messages, counter=self._single_counter)

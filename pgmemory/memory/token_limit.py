"""What memories with a token limit share: a counter, and the most whole turns that fit."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

from langchain_core.language_models import BaseLanguageModel
from pydantic import Field, PlainSerializer, PrivateAttr, model_validator
from typing_extensions import Self

from pgmemory.errors import ConfigurationError
from pgmemory.logged import LoggedWindow, to_logged_window
from pgmemory.memory.base import PostgresChatMemory
from pgmemory.memory.selection import Selection, Verdict
from pgmemory.models import AFTER_ALL, Window
from pgmemory.tokens import TOKENS_AROUND_ALL, CustomCounter, EncodingCounter, resolve_counter
from pgmemory.turns import LoggedMessage, Turn, longest_suffix, shown, split_turns

TokenLimit = Annotated[
    int | Callable[[dict[str, Any]], int],
    # A function has no place in a dump.
    PlainSerializer(lambda limit: None if callable(limit) else limit, return_type=int | None),
]


class TokenLimitMemory(PostgresChatMemory):
    """Base of the memories that count tokens.

    Attributes:
        token_counter: A tiktoken encoding or a model's name, a language model that counts for itself, or a function
            of a list of messages; None for ``o200k_base``.
    """

    token_counter: Any = Field(default=None, exclude=True, repr=False)

    _counter: EncodingCounter | CustomCounter = PrivateAttr()

    @model_validator(mode="after")
    def _resolve_counter(self) -> Self:
        self._counter = resolve_counter(self.token_counter, self._counting_llm())
        return self

    def _counting_llm(self) -> BaseLanguageModel[Any] | None:
        return None

    @property
    def _single_counter(self) -> EncodingCounter | None:
        """The counter, if it counts messages singly, so that their counts can be stored and added up."""
        return self._counter if isinstance(self._counter, EncodingCounter) else None

    def _count(self, parts: Iterable[Sequence[LoggedMessage]]) -> int:
        """Return the tokens of parts of a window together; 0 if they hold no message."""
        messages = list(chain.from_iterable(parts))
        if self._single_counter is None:
            return self._counter.count([logged.message for logged in messages])
        return TOKENS_AROUND_ALL + sum(logged.token_count or 0 for logged in messages) if messages else 0

    def _counted(self, window: Window) -> LoggedWindow:
        """Turn a window's records into messages, each with its token count."""
        logged = to_logged_window(window, self._counter.encoding)
        return replace(logged, system=self._with_counts(logged.system), messages=self._with_counts(logged.messages))

    def _with_counts(self, messages: Sequence[LoggedMessage]) -> list[LoggedMessage]:
        counter = self._single_counter
        if counter is None:
            return list(messages)
        return [
            logged._replace(token_count=counter.count_message(logged.message)) if logged.token_count is None else logged
            for logged in messages
        ]

    def _longest_suffix(self, turns: Sequence[Turn], head: list[LoggedMessage], limit: int) -> list[Turn]:
        """Return the most turns, newest first, that fit the limit behind the head."""
        return longest_suffix(turns, lambda some: self._count([head, *some]) <= limit)

    def _pages(self, read: Callable[[int, int], Window], size: int, *, counted: bool = True) -> Iterator[LoggedWindow]:
        """Read what the history shows of a log from its end, page after page, each twice as large as the one before.

        Args:
            read: Reads one page, given its size and the index above its newest message.
            size: Size of the first page, from 1.
            counted: Give each message its token count.
        """
        before = self.chat_memory.before
        while True:
            stored = read(size, before)
            window = self._counted(stored) if counted else to_logged_window(stored)
            yield window
            if window.complete:
                return
            before = window.messages[0].message_index
            size *= 2

    def _newest_turns(
        self,
        pages: Iterable[LoggedWindow],
        *,
        head_of: Callable[[LoggedWindow], list[LoggedMessage]],
        limit: int | Callable[[int], int] | None,
        max_turns: int | None = None,
        min_turns: int = 0,
    ) -> Selection:
        """Choose what stands before the turns, and the most whole turns that fit behind it; none if it does not fit.

        Args:
            pages: Neighbouring parts of the log, newest first, each of whole turns.
            head_of: What a page says should stand before the turns.
            limit: The limit for all that is shown, or a function of the head's tokens that returns it; None for no
                limit, in which case nothing is counted.
            max_turns: At most this many turns.
            min_turns: At least this many turns, even if they don't fit.
        """
        turns: list[Turn] = []
        head: list[LoggedMessage] = []
        for page in pages:
            head = head_of(page)
            turns = [shown(turn) for turn in split_turns(page.messages)[1]] + turns
            kept = turns if max_turns is None else turns[max(0, len(turns) - max_turns) :]
            if limit is not None:
                head_tokens = self._count([head])
                most = limit(head_tokens) if callable(limit) else limit
                if head_tokens > most:
                    return Selection([], [], limit)
                kept = self._longest_suffix(kept, head, most)
            if len(kept) < len(turns) or len(kept) == max_turns:
                return Selection(head, kept if len(kept) >= min_turns else turns[len(turns) - min_turns :], limit)
        return Selection(head, turns, limit)

    # Explaining

    @property
    def _explaining_counter(self) -> EncodingCounter | CustomCounter:
        return self._counter

    def _verdict_on_head(self, system: Sequence[LoggedMessage], selection: Selection) -> Verdict:
        limit = selection.limit
        if isinstance(limit, int) and (tokens := self._count([system])) > limit:
            reason = f"The system messages before the first turn take {tokens} tokens, over the limit of {limit}."
            return Verdict("beyond_limit", reason)
        return super()._verdict_on_head(system, selection)

    def _verdicts_by_limit(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        """Say of each of the turns that were to be chosen from whether it fitted the limit."""
        limit = self._resolved_limit(selection)
        if limit is None:
            return [Verdict("kept", "Shown without a token limit.")] * len(turns)
        oldest = min((logged.message_index for turn in selection.turns for logged in turn), default=AFTER_ALL)
        verdicts: list[Verdict] = []
        too_many: Verdict | None = None
        for turn in reversed(turns):
            # A turn of which nothing is shown takes no tokens: the limit is not why.
            if turn[0].message_index >= oldest or not (as_shown := shown(turn)):
                verdicts.append(Verdict("kept", f"Among the newest turns that fit {limit} tokens."))
            elif too_many is not None:
                verdicts.append(too_many)
            else:
                too_many = Verdict("beyond_limit", f"Older than a turn that does not fit the limit of {limit} tokens.")
                tokens = self._count([selection.head, as_shown, *selection.turns])
                # A counter of one's own may say otherwise where at least one turn is shown, whatever it costs.
                reason = f"With this turn the window would take {tokens} tokens, over the limit of {limit}."
                verdicts.append(Verdict("beyond_limit", reason) if tokens > limit else too_many)
        return verdicts[::-1]

    def _resolved_limit(self, selection: Selection) -> int | None:
        return selection.limit(self._count([selection.head])) if callable(selection.limit) else selection.limit


def validated_limit(limit: Any, inputs: dict[str, Any]) -> int:
    """Return a token limit, asking for it if it is a function of the chain's inputs.

    Raises:
        ConfigurationError: It is no whole number from 0.
    """
    value = limit(inputs) if callable(limit) else limit
    try:
        number = -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ConfigurationError(f"max_token_limit must be a whole number from 0, not {value!r}")
    return number


def system_of(window: LoggedWindow) -> list[LoggedMessage]:
    """Return the system messages from before the first turn."""
    return window.system

"""A rolling summary, and the turns that are not in it yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.messages import BaseMessage, SystemMessage
from langchain_core.prompts import BasePromptTemplate
from pydantic import Field, model_validator
from typing_extensions import Self

from pgmemory._compat import SUMMARY_PROMPT
from pgmemory.errors import ConfigurationError, SummaryError
from pgmemory.formats import text_of
from pgmemory.history import as_list
from pgmemory.logged import LoggedWindow, to_stored_messages
from pgmemory.memory.base import PostgresChatMemory, messages_of
from pgmemory.memory.selection import Selection, SummaryMessage, Verdict
from pgmemory.memory.token_limit import TokenLimitMemory
from pgmemory.models import Window
from pgmemory.tokens import TOKENS_AROUND_ALL
from pgmemory.turns import LoggedMessage, Turn, is_preamble_system, shown, split_turns
from pgmemory.workers import Workers

_logger = logging.getLogger(__name__)

# Threads that wait for language models, for asynchronous callers.
_folders = Workers(16)


class SummaryMemory(TokenLimitMemory):
    """Show the preamble's system messages, the summary so far, and whole turns that are not yet in it.

    When what is shown passes the limit, saving a turn folds the oldest whole turns into the summary, down to half of
    what may be shown. The newest turn and the preamble's system messages are never folded. Summaries are kept in the
    database: they survive restarts, and of two workers that fold at once one wins, so that no message is summarised
    twice or lost. From its first save until it is cleared, `max_messages` spares in this conversation what no summary
    covers. If the model fails, the turn is stored already, the failure is logged and the next save tries again.

    Attributes:
        llm: The language model that summarises.
        max_token_limit: The limit for all that is loaded, as messages. The turns may use half of it in any case, so a
            summary that is longer than the other half passes it: bound it with the prompt or the model. While the
            model fails, the newest turns up to twice the limit are shown.
        prompt: Its variables are ``summary`` and ``new_lines``.
        summary_message_cls: Class of the message that shows the summary.
    """

    # Not BaseLanguageModel[Any]: pydantic would make a class of it that no model is an instance of.
    llm: BaseLanguageModel = Field(exclude=True, repr=False)  # type: ignore[type-arg]
    max_token_limit: int = Field(default=2000, ge=0)
    prompt: BasePromptTemplate = Field(default=SUMMARY_PROMPT, exclude=True, repr=False)  # type: ignore[type-arg]
    summary_message_cls: type[BaseMessage] = Field(default=SystemMessage, exclude=True, repr=False)

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        variables = set(self.prompt.input_variables)
        if variables != {"summary", "new_lines"}:
            raise ConfigurationError(
                f"the prompt's variables must be 'summary' and 'new_lines', not {sorted(variables)}"
            )
        try:
            self.summary_message_cls(content="")
        except Exception as error:
            raise ConfigurationError(
                f"summary_message_cls must be a message class that content is enough for: {error}"
            ) from None
        return self

    def _select(self, inputs: dict[str, Any]) -> Selection:
        """Return the summary and the turns that are not in it. One round trip; asks no model.

        Turns that nobody has folded yet, as in a log that others wrote, are bounded to twice the limit; at least the
        newest turn is shown.
        """
        key, encoding = self.chat_memory.key, self._counter.encoding
        pages = self._pages(
            lambda budget, before: self._store.read_summary_window(
                key, budget=budget, encoding=encoding, before=before
            ),
            max(1, 2 * self.max_token_limit),
        )
        selection = self._newest_turns(
            pages,
            head_of=self._head,
            limit=lambda head_tokens: max(2 * self.max_token_limit, self._ceiling(head_tokens)),
            min_turns=1,
        )
        # Another worker may have folded between two pages: the newer summary counts.
        covered = _covered(selection)
        turns = [turn for turn in selection.turns if turn and turn[0].message_index > covered]
        return replace(selection, turns=turns)

    def fold(self) -> bool:
        """Fold the oldest turns if what would be shown passes the limit, as saving does; tell whether any were folded.

        For logs that others wrote. A long log is folded in several calls of the model, each of about twice the limit
        and each taking effect at once, so that an interrupted fold goes on where it was. No connection is held while
        the model works.

        Raises:
            SummaryError: The model answered without text. What it raises itself is passed on. What was folded before
                stays folded.
            StoreError: The database refused or could not be reached.
        """
        self.chat_memory.check_writable()
        return self._fold(self._read_unsummarized(self._page_budget))

    async def afold(self) -> bool:
        """Fold as `fold` does, without blocking the event loop."""
        return await _folders.run(self.fold)

    async def asave_context(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        """Store a turn as `save_context` does and fold if need be, without blocking the event loop."""
        if type(self).save_context is not PostgresChatMemory.save_context:
            # A subclass's own way to save holds here too, as in the other memories.
            return await _folders.run(self.save_context, inputs, outputs)
        messages: list[BaseMessage] = []
        with self._handling_save_errors():
            messages = await self._store.run_in_worker(lambda: as_list(self.turn_messages(inputs, outputs)))
        await self.asave_messages(messages)

    def save_messages(self, messages: list[BaseMessage]) -> None:
        """Store messages in one round trip, then fold if what is shown passes the limit.

        Raises as in the other memories. A fold that fails is logged, not raised.
        """
        window = self._append_turn(messages)
        if window is not None:
            self._fold_or_log(window)

    async def asave_messages(self, messages: list[BaseMessage]) -> None:
        """Store messages as `save_messages` does, without blocking the event loop."""
        if type(self).save_messages is not SummaryMemory.save_messages:
            return await _folders.run(self.save_messages, messages)
        window = await self._store.run_in_worker(self._append_turn, messages)
        if window is not None:
            # Not in the store's own threads, which others need while the model works.
            await _folders.run(self._fold_or_log, window)

    def _append_turn(self, messages: list[BaseMessage]) -> Window | None:
        """Store a turn; return what no summary covers, or None if nothing was stored."""
        with self._handling_save_errors():
            said = self.chat_memory.redacted(messages)
            if not said:
                return None
            with self.chat_memory.saving(said, self.idempotency_key) as write_id:
                return self._store.append_and_read_unsummarized(
                    self.chat_memory.key,
                    to_stored_messages(said, self._single_counter),
                    write_id=write_id,
                    budget=self._page_budget,
                    encoding=self._counter.encoding,
                    max_messages=self.chat_memory.max_messages,
                )
        return None

    def _fold_or_log(self, window: Window) -> None:
        try:
            self._fold(window)
        except Exception:
            # The turn is stored: failing now would lose an answer that was paid for. The next save tries again.
            _logger.exception(
                "session %r was not summarised; its turns are kept and the next save tries again",
                self.chat_memory.session_id,
            )

    # Folding. All amounts are tokens of what would be shown: head and turns together.

    @property
    def _page_budget(self) -> int:
        return max(1, self._batch + self.max_token_limit)

    @property
    def _batch(self) -> int:
        """What one call of the model is given at most, unless a single turn is larger."""
        return 2 * self.max_token_limit

    def _ceiling(self, head_tokens: int) -> int:
        """What may be shown before turns are folded."""
        return max(self.max_token_limit, head_tokens + self.max_token_limit // 2)

    def _goal(self, head_tokens: int) -> int:
        """What is shown after folding, at most: half of what may be, though a quarter of the limit is left to turns."""
        return max(self._ceiling(head_tokens) // 2, head_tokens + self.max_token_limit // 4)

    def _read_unsummarized(self, budget: int) -> Window:
        return self._store.read_unsummarized(self.chat_memory.key, budget=budget, encoding=self._counter.encoding)

    def _surely_fits(self, stored: Window) -> bool:
        """Tell, by stored counts alone, that nothing is to be folded: then a save makes no messages of a window."""
        counter = self._single_counter
        if counter is None or not stored.complete:
            return False
        tokens = TOKENS_AROUND_ALL
        for message in (*stored.system, *stored.messages):
            if message.token_count is None or message.token_encoding != counter.encoding:
                return False
            tokens += message.token_count
        if stored.summary is not None:
            tokens += counter.count_message(self.summary_message_cls(content=stored.summary.content))
        return tokens <= self.max_token_limit

    def _fold(self, stored: Window) -> bool:
        if self._surely_fits(stored):
            return False
        folded = False
        budget = self._page_budget
        while True:
            window = self._counted(stored)
            before, turns = split_turns(window.messages)
            if not window.complete:
                turns.pop()  # only its first message was read
            batch = self._turns_to_fold(window, turns)
            if batch:
                if not self._summarise(window, before, batch):
                    return folded  # another worker came first and goes on, or the conversation was cleared
                folded = True
            elif window.complete:
                return folded
            else:
                budget *= 2  # the page holds less than is shown: estimates were too high
            stored = self._read_unsummarized(budget)

    def _turns_to_fold(self, window: LoggedWindow, turns: list[Turn]) -> list[Turn]:
        """Return the oldest turns that the next call of the model folds, perhaps none."""
        head = self._head(window)
        head_tokens = self._count([head])
        as_shown = [shown(turn) for turn in turns]
        if self._count([head, *as_shown]) <= self._ceiling(head_tokens):
            return []
        goal = self._goal(head_tokens)
        kept = len(self._longest_suffix(as_shown, head, goal))
        if window.complete:
            kept = max(1, kept)  # never the newest turn
        surplus = turns[: len(turns) - kept]
        # A prefix that fits is, turned round, a suffix that fits.
        batch = self._longest_suffix(surplus[::-1], [], self._batch)[::-1]
        return batch or surplus[:1]

    def _summarise(self, window: LoggedWindow, before: list[LoggedMessage], turns: list[Turn]) -> bool:
        assert window.state is not None, "a conversation with turns has a state"
        preamble = [logged for logged in before if not is_preamble_system(logged)]
        prompt = self.prompt.format_prompt(
            summary=window.summary.content if window.summary else "",
            new_lines=self._as_text(messages_of([preamble, *turns])),
        )
        answer = self.llm.invoke(prompt)
        summary = text_of(answer) if isinstance(answer, BaseMessage) else str(answer)
        if not summary.strip():
            raise SummaryError("the language model answered without text; nothing was folded")
        return self._store.record_summary(
            self.chat_memory.key,
            content=summary,
            covers_through=turns[-1][-1].message_index,
            state=window.state,
        )

    def _head(self, window: LoggedWindow) -> list[LoggedMessage]:
        if window.summary is None:
            return window.system
        message = self.summary_message_cls(content=window.summary.content)
        summary = SummaryMessage(message, window.summary.covers_through)
        return [*window.system, *self._with_counts([summary])]

    # Explaining

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        covered = _covered(selection)
        in_summary = [_folded(turn, covered) for turn in turns if turn[0].message_index <= covered]
        by_limit = self._verdicts_by_limit(turns[len(in_summary) :], selection)
        if by_limit and by_limit[-1].code == "kept":
            by_limit[-1] = Verdict("kept", "The newest turn is always shown.")
        return in_summary + by_limit

    def _settings(self, selection: Selection) -> dict[str, Any]:
        return {"max_token_limit": self.max_token_limit}


def _covered(selection: Selection) -> int:
    """Return the index of the last message that the summary which is shown covers; -1 without a summary."""
    return max((logged.message_index for logged in selection.head if isinstance(logged, SummaryMessage)), default=-1)


def _folded(turn: Turn, covered: int) -> Verdict:
    if turn[-1].message_index <= covered:
        return Verdict("summarized", "Its turn is in the summary.")
    return Verdict(
        "summarized", f"Its turn is in the summary up to message {covered}; the rest waits for the next one."
    )

"""What a memory would show of a log, message by message, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, FunctionMessage, SystemMessage, ToolMessage

from pgmemory.errors import PgMemoryError
from pgmemory.formats import text_with_calls
from pgmemory.logged import to_logged
from pgmemory.memory.selection import Code, Explainable, Selection, SummaryMessage, Verdict
from pgmemory.tokens import ESTIMATED, TOKENS_AROUND_ALL, CustomCounter, EncodingCounter
from pgmemory.transcript import visible
from pgmemory.turns import LoggedMessage, Turn, is_mute, is_preamble_system, shown, shown_preamble, split_turns

# A busy conversation gets a turn every few seconds; explaining a long one takes less.
_TRIES = 5

_SHORT = 60


@dataclass(frozen=True, slots=True)
class ExplainedMessage:
    """One message of the log, or one that a memory adds to it.

    Attributes:
        message_index: Its number in the log; None if the memory adds it.
        turn: Its turn, counted from 1 at the oldest that the log holds; None before the first one, and if it is added.
        role: LangChain's message type: ``human``, ``ai``, ``system``, ``tool``, …
        text: Its text and, of an AI message, its tool calls.
        tokens: What it costs by itself.
        kept: Whether the model is shown it.
        code: Why, for scripts: ``kept``; ``summary`` or ``added`` (not of the log); ``beyond_k``, ``beyond_limit``,
            ``irrelevant`` or ``summarized`` (with its turn); ``preamble`` (before the first turn, and no system
            message); ``empty``, ``unpaired_call``, ``unpaired_result`` or ``removal`` (no model accepts it);
            ``erased`` (with its key); ``left_out`` (by a memory of one's own).
        reason: Why, as a sentence.
    """

    message_index: int | None
    turn: int | None
    role: str
    text: str
    tokens: int
    kept: bool
    code: Code
    reason: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a model would be shown of a conversation, and why. `str` of it is for people, `as_dict` for scripts.

    Attributes:
        memory: The memory's class.
        settings: The settings that decide, with the limit that a function returned.
        limit: The most tokens that may be shown, or None; of a SummaryMemory more than its `max_token_limit`.
        tokens: The tokens of `shown` together, by the memory's counter; by ``o200k_base`` where it has none.
        counter: What counted: the name of an encoding, or a counter of one's own.
        estimated: Whether the encoding could not be loaded, so that tokens are estimated.
        messages: The log's messages, oldest first; what the memory adds stands before the message that follows it.
        shown: The messages as they would be loaded.
    """

    memory: str
    settings: dict[str, Any]
    limit: int | None
    tokens: int
    counter: str
    estimated: bool
    messages: tuple[ExplainedMessage, ...]
    shown: list[BaseMessage] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return all but `shown` as what JSON has."""
        parts = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in ("messages", "shown")}
        return parts | {"messages": [asdict(message) for message in self.messages]}

    def totals(self) -> str:
        """Return in one line how much is shown, by which settings."""
        kept = sum(message.kept for message in self.messages)
        limit = "" if self.limit is None else f" of at most {self.limit}"
        counter = f"estimated, for {self.counter} is not there" if self.estimated else self.counter
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        return (
            f"{self.memory}({settings}) shows {kept} of {len(self.messages)} messages, "
            f"{self.tokens} tokens{limit} ({counter})"
        )

    def __str__(self) -> str:
        lines = [
            f"{'+' if each.kept else '-'} {'' if each.message_index is None else each.message_index:>5} "
            f"{each.role:<8} {each.tokens:>6}  {shortened(each.text)} | {shortened(each.reason, 2 * _SHORT)}"
            for each in self.messages
        ]
        return "\n".join([*lines, self.totals()])


def shortened(text: str, characters: int = _SHORT) -> str:
    """Return the beginning of a text as one line that does nothing to a terminal."""
    line = visible(" ".join(text[: 4 * characters].split()), one_line=True)
    return line if len(line) <= characters and len(text) <= 4 * characters else f"{line[: characters - 1]}…"


def explain_memory(memory: Explainable, inputs: dict[str, Any]) -> Explanation:
    """Return what `PostgresChatMemory.explain` says.

    Args:
        memory: A copy of the memory's own, which notes what it chooses.
        inputs: The chain's inputs.
    """
    history, counter = memory.chat_memory, memory._explaining_counter
    for _ in range(_TRIES):
        memory._noted = []
        before = history.store.get_conversation(history.session_id, user_id=history.user_id)
        records = history.store.read_all(history.key, before=history.before)
        log = [_counted(to_logged(each, counter.encoding), counter) for each in records]
        messages = list(memory.select_messages(inputs))
        if history.store.get_conversation(history.session_id, user_id=history.user_id) == before:
            return _Explaining(type(memory).__name__, counter, log, messages, memory._noted).explanation()
    raise PgMemoryError(f"session {history.session_id!r} was written to while it was explained: try again")


class _Explaining:
    """The log, what is shown of it, and what the memories say that chose."""

    def __init__(
        self,
        memory: str,
        counter: EncodingCounter | CustomCounter,
        log: list[LoggedMessage],
        messages: list[BaseMessage],
        choices: list[tuple[Explainable, Selection]],
    ) -> None:
        self._memory = memory
        self._counter = counter
        self._log = log
        self._shown = messages
        self._preamble, self._turns = split_turns(log)
        # Of several choices, as only memories of one's own make them, the last one explains what is left out.
        self._choice = choices[-1] if choices else None
        self._chosen = [logged for _, each in choices for logged in chain(each.head, *each.turns)]
        self._elsewhere = {place: session for _, each in choices for place, session in each.elsewhere.items()}
        self._summaries = {id(each.message): each for each in self._chosen if isinstance(each, SummaryMessage)}
        self._not_of_log = self._elsewhere.keys() | self._summaries.keys()
        self._chosen_indexes = {each.message_index for each in self._chosen if id(each.message) not in self._not_of_log}
        self._covered = max((each.message_index for each in self._summaries.values()), default=-1)
        self._places = self._places_of_shown()

    def explanation(self) -> Explanation:
        """Put it together."""
        added: dict[int | None, list[ExplainedMessage]] = defaultdict(list)
        following: int | None = None
        for message, index in zip(reversed(self._shown), reversed(self._places), strict=True):
            if index is None:
                added[following].insert(0, self._added(message))
            else:
                following = index
        messages = [each for one in self._of_log() for each in (*added[one.message_index], one)] + added[None]
        limit: int | None = None
        settings: dict[str, Any] = {}
        if self._choice is not None:
            memory, selection = self._choice
            limit, settings = memory._resolved_limit(selection), memory._settings(selection)
        return Explanation(
            memory=self._memory,
            settings=settings,
            limit=limit,
            tokens=self._tokens_of_all(messages),
            counter=self._counter.encoding or repr(self._counter),
            estimated=self._counter.label == ESTIMATED,
            messages=tuple(messages),
            shown=self._shown,
        )

    def _places_of_shown(self) -> list[int | None]:
        """Return for each message that is shown its number in the log, or None if it is not from there.

        Where it is not the very object that was chosen, the newest equal one of the log is meant.
        """
        of_object = {
            id(each.message): each.message_index for each in self._chosen if id(each.message) not in self._not_of_log
        }
        places = [of_object.get(id(message)) for message in self._shown]
        used: set[int] = set()
        for place, index in enumerate(places):
            if index is None or index in used:
                places[place] = None  # shown a second time: once more than the log has it
            else:
                used.add(index)
        equals: dict[str, list[LoggedMessage]] = defaultdict(list)
        for logged in self._log:
            if logged.message_index not in used:
                equals[text_with_calls(logged.message)].append(logged)
        for place in range(len(places) - 1, -1, -1):
            message = self._shown[place]
            if places[place] is None and id(message) not in self._not_of_log and id(message) not in of_object:
                candidates = equals[text_with_calls(message)]
                found = next((each for each in reversed(candidates) if each.message == message), None)
                if found is not None:
                    candidates.remove(found)
                    places[place] = found.message_index
        return places

    # The messages of the log

    def _of_log(self) -> Iterator[ExplainedMessage]:
        kept = set(self._places)
        on_head, on_turns = self._verdicts()
        preamble = ((logged, None, verdict) for logged, verdict in self._on_preamble(on_head))
        for logged, turn, verdict in chain(preamble, self._on_turns(on_turns)):
            index = logged.message_index
            if index in kept:
                if verdict.code != "kept" or index not in self._chosen_indexes:
                    verdict = Verdict("kept", f"Shown by {self._memory}.select_messages.")
            elif logged.is_erased:
                verdict = Verdict("erased", "Its key was erased, so it cannot be read.")
            elif self._choice is None or index in self._chosen_indexes or verdict.code == "kept":
                verdict = Verdict("left_out", f"Left out by {self._memory}.select_messages.")
            assert logged.token_count is not None, "the whole log was counted"
            yield _explained(logged.message, logged.token_count, verdict, index=index, turn=turn, kept=index in kept)

    def _verdicts(self) -> tuple[Verdict, list[Verdict]]:
        """Return what the memory says of the system messages before the first turn, and of each turn."""
        if self._choice is None:
            kept = Verdict("kept", "")
            return kept, [kept] * len(self._turns)
        memory, selection = self._choice
        system = shown_preamble([logged for logged in self._preamble if is_preamble_system(logged)])
        on_head, on_turns = memory._verdict_on_head(system, selection), memory._verdicts(self._turns, selection)
        if on_head.code != "kept":
            on_turns = [on_head if verdict.code in ("kept", "beyond_limit") else verdict for verdict in on_turns]
        return on_head, on_turns

    def _on_preamble(self, on_head: Verdict) -> Iterator[tuple[LoggedMessage, Verdict]]:
        accepted = {logged.message_index for logged in shown_preamble(self._preamble)}
        for logged in self._preamble:
            if logged.message_index in accepted and is_preamble_system(logged):
                yield logged, on_head
            elif logged.message_index in self._chosen_indexes:
                yield logged, Verdict("kept", "Stands before the first turn.")
            elif logged.message_index <= self._covered:
                yield logged, Verdict("summarized", "It is in the summary.")
            elif logged.message_index in accepted:
                yield logged, Verdict("preamble", "Stands before the first turn and is no system message.")
            else:
                yield logged, _on_refused(logged.message)

    def _on_turns(self, on_turns: list[Verdict]) -> Iterator[tuple[LoggedMessage, int, Verdict]]:
        for number, (turn, verdict) in enumerate(zip(self._turns, on_turns, strict=True), 1):
            accepted = {logged.message_index for logged in shown(turn)}
            for logged in turn:
                if verdict.code != "kept" or logged.message_index in accepted:
                    yield logged, number, verdict
                else:
                    refused = _on_refused(logged.message) if accepted else _on_empty_turn(logged, turn)
                    yield logged, number, refused

    # What the memory adds, and tokens

    def _added(self, message: BaseMessage) -> ExplainedMessage:
        verdict = Verdict("added", f"Added by {self._memory}.select_messages.")
        if (summary := self._summaries.get(id(message))) is not None:
            verdict = Verdict("summary", f"The summary of what was said up to message {summary.message_index}.")
        elif (session_id := self._elsewhere.get(id(message))) is not None:
            verdict = Verdict("added", f"Recalled from session {session_id!r}.")
        return _explained(message, _count_one(self._counter, message), verdict)

    def _tokens_of_all(self, messages: list[ExplainedMessage]) -> int:
        if not isinstance(self._counter, EncodingCounter):
            return self._counter.count(self._shown)
        tokens = [message.tokens for message in messages if message.kept]
        return TOKENS_AROUND_ALL + sum(tokens) if tokens else 0


def _explained(
    message: BaseMessage,
    tokens: int,
    verdict: Verdict,
    *,
    index: int | None = None,
    turn: int | None = None,
    kept: bool = True,
) -> ExplainedMessage:
    return ExplainedMessage(
        message_index=index,
        turn=turn,
        role=message.type,
        text=text_with_calls(message),
        tokens=tokens,
        kept=kept,
        code=verdict.code,
        reason=verdict.reason,
    )


def _count_one(counter: EncodingCounter | CustomCounter, message: BaseMessage) -> int:
    return counter.count_message(message) if isinstance(counter, EncodingCounter) else counter.count([message])


def _counted(logged: LoggedMessage, counter: EncodingCounter | CustomCounter) -> LoggedMessage:
    if logged.token_count is not None:
        return logged
    return logged._replace(token_count=_count_one(counter, logged.message))


def _on_refused(message: BaseMessage) -> Verdict:
    """Say why no model accepts a message that `shown` leaves out of what it shows else."""
    if is_mute(message):
        return Verdict("empty", "It has neither text nor calls.")
    if isinstance(message, AIMessage):
        return Verdict("unpaired_call", "A tool call of it has no result of its own right after it.")
    if isinstance(message, (ToolMessage, FunctionMessage)):
        return Verdict("unpaired_result", "No tool call that is shown right before it waits for it.")
    return Verdict("removal", "It says nothing to a model.")


def _on_empty_turn(logged: LoggedMessage, turn: Turn) -> Verdict:
    mute = next(each for each in turn if is_mute(each.message) and not isinstance(each.message, SystemMessage))
    if mute.is_erased:
        return Verdict("erased", f"Message {mute.message_index} of its turn cannot be read, for its key was erased.")
    if logged is mute:
        return Verdict("empty", "It has neither text nor calls, so its whole turn is left out.")
    return Verdict("empty", f"Message {mute.message_index} of its turn has neither text nor calls.")

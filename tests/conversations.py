"""Conversations for the tests, and what a view should make of them.

Builders of single messages, hypothesis strategies of whole logs, ways to write one, and a naive reference of the rules:
what a turn is, what of it is shown, what it costs. The reference goes over plain lists of messages and shares no code
with the package.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import chain, cycle
from typing import Any

import tiktoken
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from pgmemory import ConversationStore, PostgresChatMemory, PostgresChatMessageHistory
from pgmemory.tokens import EncodingCounter

# Builders


def human(text: Any = "question") -> HumanMessage:
    """A message that begins a turn."""
    return HumanMessage(text)


def ai(text: Any = "answer", **fields: Any) -> AIMessage:
    """An answer."""
    return AIMessage(text, **fields)


def system(text: str = "be kind") -> SystemMessage:
    """An instruction."""
    return SystemMessage(text)


def calling(*ids: str, text: str = "") -> AIMessage:
    """An AI message that calls a tool once for each id."""
    return AIMessage(text, tool_calls=[{"name": "search", "args": {"query": f"about {id}"}, "id": id} for id in ids])


def miscalling(*ids: str) -> AIMessage:
    """An AI message whose calls have arguments that could not be parsed."""
    calls = [{"name": "search", "args": "{oops", "id": id, "error": None} for id in ids]
    return AIMessage("", invalid_tool_calls=calls)


def result(id: str, text: str = "found") -> ToolMessage:
    """The result of the call with this id."""
    return ToolMessage(text, tool_call_id=id)


def function_calling(name: str, text: str = "") -> AIMessage:
    """An AI message with a call of the older form."""
    return AIMessage(text, additional_kwargs={"function_call": {"name": name, "arguments": '{"query": "x"}'}})


def function_result(name: str, text: str = "found") -> FunctionMessage:
    """The result of a call of the older form."""
    return FunctionMessage(name=name, content=text)


def dialogue(count: int, *, first: int = 1) -> list[BaseMessage]:
    """So many turns: question 1, answer 1, question 2, …"""
    numbers = range(first, first + count)
    return list(chain.from_iterable((human(f"question {n}"), ai(f"answer {n}")) for n in numbers))


# Strategies

MUTE = ["", " ", "\n\t ", [], [""], [{"type": "text", "text": " "}], ["", {"type": "text", "text": ""}]]

texts = st.sampled_from(
    [
        "",
        " ",
        "ok",
        "refund",
        "a refund, please",
        "Where is parcel 66?",
        "hi <|endoftext|> <|im_start|>",
        "订单聊天记录断裂问题",
        "STRASSE",
        "100% {x} %(y)s \\ '\"",
        "Thank you for waiting. I have looked into your order and it left our warehouse this morning.",
    ]
)
ids = st.sampled_from(["c1", "c2", "c3"])
names = st.sampled_from(["lookup", "weather"])
contents: st.SearchStrategy[Any] = texts | st.sampled_from(
    [
        [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}],
        [{"type": "reasoning", "summary": ["hm"]}],
        ["two", {"type": "text", "text": "parts"}],
    ]
)


@st.composite
def tool_rounds(draw: st.DrawFn) -> list[BaseMessage]:
    """Calls with all, some, none or more than all of their results, in any order."""
    call_ids = draw(st.lists(ids, min_size=1, max_size=3))
    call = draw(st.sampled_from([calling, miscalling]))(*call_ids)
    answered = draw(st.sampled_from([call_ids, call_ids, call_ids[1:], call_ids[:1], [], [*call_ids, "c9"]]))
    return [call, *(result(id) for id in draw(st.permutations(answered)))]


@st.composite
def function_rounds(draw: st.DrawFn) -> list[BaseMessage]:
    """A call of the older form with its result, another's result, or none."""
    name = draw(names)
    return [function_calling(name), *map(function_result, draw(st.sampled_from([[name], [name], [], ["other"]])))]


_plain_turns = st.tuples(contents.map(human), texts.filter(str.strip).map(ai)).map(list)
_one_message = (
    contents.map(human)
    | contents.map(ai)
    | st.sampled_from(MUTE).map(ai)
    | texts.map(system)
    | ids.map(result)
    | names.map(function_result)
    | texts.map(lambda text: ChatMessage(role="critic", content=text))
    | ids.map(lambda id: RemoveMessage(id=id))
)
_parts = _plain_turns | _plain_turns | tool_rounds() | function_rounds() | _one_message.map(lambda message: [message])

messages = _one_message | st.builds(calling, ids, ids) | ids.map(miscalling) | names.map(function_calling)
"""Any single message."""

logs: st.SearchStrategy[list[BaseMessage]] = st.lists(_parts, max_size=12).map(
    lambda parts: list(chain.from_iterable(parts))
)
"""A conversation as it may have been logged: orderly turns, and whatever crashes and old code leave behind."""


# Writing

Writer = Callable[[ConversationStore, str, Sequence[BaseMessage]], None]


def write_as_others(store: ConversationStore, session_id: str, log: Sequence[BaseMessage]) -> None:
    """Write messages as a plain history does: without token counts, without verdicts."""
    PostgresChatMessageHistory(session_id, store).add_messages(log)


def writing(memory_class: type[PostgresChatMemory], **options: Any) -> Writer:
    """Return a writer that saves messages through a memory, as one turn, whatever they are."""

    class Saves(memory_class):  # type: ignore[misc, valid-type]
        def turn_messages(self, inputs: dict[str, Any], outputs: dict[str, Any]) -> list[BaseMessage]:
            return list(inputs["messages"])

    def write(store: ConversationStore, session_id: str, log: Sequence[BaseMessage]) -> None:
        Saves(session_id=session_id, store=store, **options).save_context({"messages": log}, {})

    return write


def write_in_parts(
    store: ConversationStore,
    session_id: str,
    log: Sequence[BaseMessage],
    writers: Sequence[Writer],
    cuts: Iterable[int],
) -> None:
    """Write a log in parts that end at the cuts, each by the next of the writers."""
    ends = sorted({0, len(log), *(min(cut, len(log)) for cut in cuts)})
    for start, end, writer in zip(ends, ends[1:], cycle(writers), strict=False):
        writer(store, session_id, log[start:end])


# The reference: what a turn is, what of it is shown


def split(log: Sequence[BaseMessage]) -> tuple[list[BaseMessage], list[list[BaseMessage]]]:
    """Return the preamble and the turns."""
    starts = [place for place, message in enumerate(log) if isinstance(message, HumanMessage)]
    ends = [*starts, len(log)]
    return list(log[: ends[0]]), [list(log[start:end]) for start, end in zip(ends, ends[1:], strict=False)]


def is_result(message: BaseMessage) -> bool:
    """Tell whether this is a tool's or a function's result."""
    return message.type in ("tool", "function")


def calls_of(message: BaseMessage) -> list[tuple[str, Any]]:
    """Return a mark for each call that a message makes."""
    if not isinstance(message, AIMessage):
        return []
    calls = [("tool", call["id"]) for call in message.tool_calls]
    calls += [("tool", call["id"]) for call in message.invalid_tool_calls]
    if not calls and "function_call" in message.additional_kwargs:
        calls = [("function", message.additional_kwargs["function_call"]["name"])]
    return calls


def answered_by(message: BaseMessage) -> tuple[str, Any]:
    """Return the mark of the call that a result answers."""
    return ("tool", message.tool_call_id) if isinstance(message, ToolMessage) else ("function", message.name)


def is_mute(message: BaseMessage) -> bool:
    """Tell whether this is a human, system or AI message with neither text nor calls."""
    if not isinstance(message, (HumanMessage, SystemMessage, AIMessage)) or calls_of(message):
        return False
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = [block if isinstance(block, str) else block.get("text", "not a text") for block in blocks]
    return not "".join(texts).strip()


def shown_of(part: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return what is shown of a turn, or of a preamble without its mute messages."""
    if any(is_mute(message) for message in part if not isinstance(message, SystemMessage)):
        return []
    shown: list[BaseMessage] = []
    for place, message in enumerate(part):
        if message.type == "remove" or is_result(message) or is_mute(message):
            continue  # results come in with their calls
        following = []
        for other in part[place + 1 :]:
            if not is_result(other):
                break
            following.append(other)
        unused = list(range(len(following)))
        answers = []
        for call in calls_of(message):
            mine = [i for i in unused if answered_by(following[i]) == call]
            answers += mine[:1]
            unused = [i for i in unused if i not in mine[:1]]
        calls = calls_of(message)
        if len(answers) == len(set(calls)) == len(calls) and all(mark for _, mark in calls):
            shown += [message, *(following[i] for i in sorted(answers))]
    return shown


def shown_preamble_of(part: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return what is shown of a preamble."""
    return shown_of([message for message in part if not is_mute(message)])


def head_of(log: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the system messages from before the first turn, which every window keeps."""
    return [message for message in split(log)[0] if isinstance(message, SystemMessage) and not is_mute(message)]


def windows_of(log: Sequence[BaseMessage]) -> list[list[BaseMessage]]:
    """Return every window of a log without its head: that of no turn, of the newest turn, of the last two, …"""
    turns = [shown_of(turn) for turn in split(log)[1]]
    return [list(chain.from_iterable(turns[start:])) for start in range(len(turns), -1, -1)]


def widest_window(
    log: Sequence[BaseMessage], limit: int, count: Callable[[list[BaseMessage]], int], *, min_turns: int = 0
) -> list[BaseMessage]:
    """Return the head and the most whole turns that fit the limit with it; nothing if the head alone does not fit."""
    head = head_of(log)
    if count(head) > limit:
        return []
    windows = windows_of(log)
    fitting = [window for turns, window in enumerate(windows) if turns <= min_turns or count(head + window) <= limit]
    return head + fitting[-1]


# The reference: what messages cost


@cache
def _encoding() -> tiktoken.Encoding:
    assert EncodingCounter("o200k_base").label == "o200k_base"  # puts the encoding's file where tiktoken looks
    return tiktoken.get_encoding("o200k_base")


def tokens_in(value: Any) -> int:
    """Return the tokens of a text, or of a value's JSON text."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return len(_encoding().encode(text, disallowed_special=()))


def tokens_of(message: BaseMessage) -> int:
    """Return what one message costs: 3, role, content, name and calls."""
    role = {"human": "user", "ai": "assistant", "chat": getattr(message, "role", "")}.get(message.type, message.type)
    cost = 3 + tokens_in(role)
    for block in [message.content] if isinstance(message.content, str) else message.content:
        kind = "text" if isinstance(block, str) else block["type"]
        if kind == "image_url":
            cost += 765
        else:
            cost += tokens_in(block["text"] if isinstance(block, dict) and kind == "text" else block)
    for call in [*getattr(message, "tool_calls", []), *getattr(message, "invalid_tool_calls", [])]:
        cost += tokens_in(call["name"]) + tokens_in(call["args"])
    if function_call := message.additional_kwargs.get("function_call"):
        cost += tokens_in(function_call["name"]) + tokens_in(function_call["arguments"])
    if isinstance(message, ToolMessage):
        cost += 3
    elif message.name:
        cost += tokens_in(message.name) + 1
    return cost


def tokens_of_all(messages: Sequence[BaseMessage]) -> int:
    """Return what messages cost together: 3 for the whole; nothing if there are none."""
    return 3 + sum(map(tokens_of, messages)) if messages else 0


def words_in(messages: Sequence[BaseMessage]) -> int:
    """A counter of one's own: the words of the contents alone."""
    return sum(len(str(message.content).split()) for message in messages)


def characters_in(messages: Sequence[BaseMessage]) -> int:
    """A counter of one's own: the characters of contents and calls."""
    return sum(len(str(message.content)) + len(str(getattr(message, "tool_calls", ""))) for message in messages)

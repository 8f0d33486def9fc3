"""Messages to rows and back.

`golden_rows.json` holds the rows of `golden_messages`. It shows that both LangChain lines write the same rows and load
them equal, so it is written by one line and read by the other. To write it anew, from the project's root:

    python -m tests.test_serialization
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    BaseMessageChunk,
    ChatMessage,
    ChatMessageChunk,
    FunctionMessage,
    FunctionMessageChunk,
    HumanMessage,
    HumanMessageChunk,
    RemoveMessage,
    SystemMessage,
    SystemMessageChunk,
    ToolMessage,
    ToolMessageChunk,
    message_chunk_to_message,
)
from pydantic import BaseModel, Field, SecretStr
from pydantic.dataclasses import dataclass as pydantic_dataclass

from pgmemory import serialization
from pgmemory.errors import MessageNotStorableError
from pgmemory.models import StoredMessage
from pgmemory.serialization import to_json_text, to_message, to_stored

GOLDEN_ROWS = Path(__file__).with_name("golden_rows.json")
CONSTRUCTOR = {"lc": 1, "type": "constructor", "id": ["langchain_core", "messages", "AIMessage"], "kwargs": {"a": 1}}


def same(loaded: BaseMessage, message: BaseMessage) -> None:
    """Assert equality of type and values, and of what == overlooks: key order, 1 and 1.0, 0.0 and -0.0."""
    assert type(loaded) is type(message)
    assert loaded == message
    assert repr(loaded) == repr(message)


def round_trip(message: BaseMessage) -> BaseMessage:
    return to_message(to_stored(message))


# --- what a message can hold ---


def joined(text: str) -> str:
    """Return the text with each pair of surrogates as the character that it encodes, as JSON has it."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")


texts = st.text(st.one_of(st.characters(), st.sampled_from("\x00\ud800\udfff\ud83d\udca9😀e\u0301")), max_size=12).map(
    joined
)
numbers = st.one_of(
    st.integers(),
    st.integers(-(10**40), 10**40),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([1e300, 1e22, -0.0, 0.0, 5e-324, 10**300]),
)
json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=8,
)
objects = st.dictionaries(texts, json_values, max_size=3)
blocks = st.one_of(
    texts,
    st.fixed_dictionaries({"type": st.just("text"), "text": texts}),
    st.fixed_dictionaries({"type": st.just("image_url"), "image_url": objects}),
    objects,
)
common: dict[str, st.SearchStrategy[Any]] = {
    "content": st.one_of(texts, st.lists(blocks, max_size=3)),
    "id": st.none() | texts,
    "additional_kwargs": objects,
    "response_metadata": objects,
    "note": json_values,  # an extra field
}
named = {**common, "name": st.none() | texts}
tool_calls = st.lists(st.fixed_dictionaries({"name": texts, "args": objects, "id": st.none() | texts}), max_size=2)
invalid_tool_calls = st.lists(
    st.fixed_dictionaries(dict.fromkeys(["name", "args", "id", "error"], st.none() | texts)), max_size=2
)
usage = st.fixed_dictionaries(
    {"input_tokens": st.integers(), "output_tokens": st.integers(), "total_tokens": st.integers()}
)
messages = st.one_of(
    st.builds(HumanMessage, **named),
    st.builds(SystemMessage, **named),
    st.builds(
        AIMessage,
        **named,
        tool_calls=tool_calls,
        invalid_tool_calls=invalid_tool_calls,
        usage_metadata=st.none() | usage,
    ),
    st.builds(
        ToolMessage, **named, tool_call_id=texts, artifact=json_values, status=st.sampled_from(["success", "error"])
    ),
    st.builds(FunctionMessage, **common, name=texts),
    st.builds(ChatMessage, **named, role=texts),
    st.tuples(texts, json_values).map(lambda drawn: RemoveMessage(id=drawn[0], note=drawn[1])),
)


# --- exactly what was said ---


@given(messages)
@settings(max_examples=600, suppress_health_check=[HealthCheck.too_slow])
def test_every_message_comes_back_equal_from_ascii_json(message: BaseMessage) -> None:
    stored = to_stored(message)
    same(to_message(stored), message)
    for text in (stored.additional_kwargs, stored.extra):
        assert text is None or text.isascii()
    assert "\x00" not in stored.content
    stored.content.encode()


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage("Hello"),
        AIMessage("Grüße 😀"),
        AIMessage(""),
        SystemMessage("Be kind."),
        HumanMessage("100%s {x} %(y)s"),
        HumanMessage("a\r\n\tb\u2028c\x7f"),
    ],
)
def test_a_plain_message_needs_only_role_and_content(message: BaseMessage) -> None:
    assert to_stored(message) == StoredMessage(role=message.type, content=str(message.content))
    same(round_trip(message), message)


def test_everything_else_that_an_ai_message_carries_comes_back() -> None:
    message = AIMessage(
        "I look.",
        id="run-1",
        name="guide",
        tool_calls=[
            {"name": "search", "args": {"zeta": 1, "a": 2, "f": 1e22, "g": -0.0, "h": 1e300}, "id": "c1"},
            {"name": "stop", "args": {}, "id": None},
        ],
        invalid_tool_calls=[{"name": "search", "args": "{", "id": "c3", "error": "no JSON"}],
        usage_metadata={"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "input_token_details": {"audio": 1}},
        response_metadata={"model_name": "m", "logprobs": None},
        additional_kwargs={"refusal": None},
    )
    loaded = round_trip(message)
    same(loaded, message)
    assert isinstance(loaded, AIMessage)
    assert list(loaded.tool_calls[0]["args"]) == ["zeta", "a", "f", "g", "h"]
    assert type(loaded.tool_calls[0]["args"]["f"]) is float


def test_a_failed_tool_result_keeps_its_status_and_artifact() -> None:
    message = ToolMessage(
        "no such city", tool_call_id="c1", name="search", status="error", artifact={"rows": [0, None]}
    )
    same(round_trip(message), message)


@pytest.mark.parametrize("artifact", [0, False, "", [], {}, 0.0])
def test_an_empty_artifact_is_not_taken_for_none(artifact: object) -> None:
    message = ToolMessage("", tool_call_id="", artifact=artifact)
    same(round_trip(message), message)


def test_a_chat_message_keeps_its_role() -> None:
    message = ChatMessage("Too long.", role="critic", name="Ann")
    assert to_stored(message).role == "chat"
    same(round_trip(message), message)


def test_a_message_without_an_id_comes_back_without_one() -> None:
    assert round_trip(HumanMessage("Hello")).id is None


def test_tool_calls_and_usage_that_were_changed_later_come_back_as_they_were() -> None:
    raw = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = AIMessage("", additional_kwargs={"tool_calls": raw})
    assert message.tool_calls
    message.tool_calls = []
    same(round_trip(message), message)
    message.tool_calls = [{"id": "c1", "name": "f", "args": {"x": 1}}]
    message.usage_metadata = {"input_tokens": 1}  # type: ignore[typeddict-item]
    same(round_trip(message), message)


def test_an_extra_field_may_be_named_like_a_constructor_parameter_of_the_other_line() -> None:
    row = StoredMessage("human", "Hello", extra='{"content_blocks": [{"type": "text", "text": "other"}], "text": "t"}')
    loaded = to_message(row)
    assert loaded.content == "Hello"
    assert loaded.model_extra == {"content_blocks": [{"type": "text", "text": "other"}], "text": "t"}


def test_example_false_is_dropped_and_example_true_kept() -> None:
    for message_class in (HumanMessage, AIMessage):
        assert to_stored(message_class("Hello", example=False)).extra is None
        message = message_class("Hello", example=True)
        assert to_stored(message).extra == '{"example": true}'
        same(round_trip(message), message)


def test_a_constructor_shaped_dict_stays_a_dict() -> None:
    message = ToolMessage(
        "ok", tool_call_id="c1", artifact=CONSTRUCTOR, additional_kwargs=CONSTRUCTOR, response_metadata=CONSTRUCTOR
    )
    same(round_trip(message), message)
    call = AIMessage("", tool_calls=[{"name": "f", "args": CONSTRUCTOR, "id": "c1"}])
    same(round_trip(call), call)


def test_very_long_content_comes_back() -> None:
    text = "ä😀\n" * 1_700_000
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 500_000}}
    for content in (text, [{"type": "text", "text": "look"}, image]):
        assert round_trip(HumanMessage(content)).content == content


def test_all_real_dialogues_come_back(shared_data: Path) -> None:
    build: dict[str, Callable[..., BaseMessage]] = {"human": HumanMessage, "ai": AIMessage, "tool": ToolMessage}
    dialogues = 0
    with open(shared_data / "agent_dialogues.jsonl", encoding="utf-8") as lines:
        for line in lines:
            dialogues += 1
            for fields in json.loads(line)["messages"]:
                message = build[fields.pop("role")](**fields)
                same(round_trip(message), message)
    assert dialogues == 60


# --- the column that people read ---


@pytest.mark.parametrize(
    ("content", "readable"),
    [
        (
            [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {}}],
            "What is this?\n[image_url]",
        ),
        (["a", "b", {"type": "text", "text": "c"}], "a\nb\nc"),
        ([{"type": "text", "text": None}, {"functionCall": {}}], "[text]\n[block]"),
        ([], ""),
        ("a\x00b", "a\ufffdb"),
        ("hi 😀 \ud83d x", "hi 😀 \ufffd x"),
        (["\udfff"], "\ufffd"),
    ],
)
def test_content_that_text_cannot_carry_is_readable_and_exact_beside_it(content: Any, readable: str) -> None:
    message = HumanMessage(content)
    stored = to_stored(message)
    assert stored.content == readable
    assert stored.extra is not None
    assert json.loads(stored.extra) == {"content": content}
    same(to_message(stored), message)


def test_two_surrogates_that_encode_one_character_come_back_as_it() -> None:
    assert round_trip(HumanMessage("\ud83d\ude00")).content == "😀"


# --- chunks, subclasses, and what is no message ---


class Ticket(HumanMessage):
    """A subclass with fields of its own."""

    number: int
    client: Any = Field(default=None, exclude=True)


class TicketChunk(AIMessageChunk):
    """A subclass of a chunk."""

    number: int = 0


class Foreign(BaseMessage):
    """A message of no known class."""

    type: str = "foreign"


@pytest.mark.parametrize(
    "chunk",
    [
        HumanMessageChunk("a", id="1"),
        SystemMessageChunk(["a", {"type": "text", "text": "b"}], name="n"),
        ToolMessageChunk("a", tool_call_id="c1", artifact=[1], status="error"),
        FunctionMessageChunk("a", name="f"),
        ChatMessageChunk("a", role="critic"),
        AIMessageChunk("a", usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3}),
        AIMessageChunk("", tool_call_chunks=[{"name": "f", "args": '{"x": 1', "id": "c1", "index": 0}])
        + AIMessageChunk("", tool_call_chunks=[{"name": None, "args": "}", "id": None, "index": 0}])
        + AIMessageChunk("", tool_call_chunks=[{"name": "g", "args": "no JSON", "id": "c2", "index": 1}]),
    ],
    ids=lambda chunk: type(chunk).__name__,
)
def test_a_chunk_is_stored_as_the_full_message(chunk: BaseMessageChunk) -> None:
    whole = message_chunk_to_message(chunk)
    assert to_stored(chunk).role == whole.type
    assert type(round_trip(chunk)) is type(whole)
    assert round_trip(chunk) == whole


def test_a_chunk_keeps_its_extra_fields() -> None:
    assert round_trip(AIMessageChunk("a", note="n")) == AIMessage("a", note="n")


def test_a_subclass_is_stored_as_its_base_with_its_fields_as_extra_fields() -> None:
    same(round_trip(Ticket("Hello", number=7, client=object())), HumanMessage("Hello", number=7))
    same(round_trip(TicketChunk("Hello", number=7)), AIMessage("Hello", number=7))


@pytest.mark.parametrize("other", [Foreign("a"), BaseMessageChunk("a", type="chunk"), "a", {"role": "user"}, None])
def test_what_is_no_known_message_is_refused(other: Any) -> None:
    with pytest.raises(MessageNotStorableError, match=rf"cannot store messages\[1\]: a {type(other).__name__} is not"):
        to_stored(other, path="messages[1]")


@pytest.mark.parametrize(("content", "path"), [(None, "message.content"), (["a", 5], "message.content[1]")])
def test_content_of_another_type_is_refused(content: Any, path: str) -> None:
    message = HumanMessage("a")
    message.content = content
    with pytest.raises(MessageNotStorableError) as error:
        to_stored(message)
    assert error.value.path == path


# --- values that JSON lacks ---


class Colour(Enum):
    RED = "red"
    SIZES = (1, 2)


class Level(IntEnum):
    HIGH = 3


class Name(str, Enum):
    ANN = "ann"


class Point(BaseModel):
    x: float
    when: date
    client: Any = Field(default=None, exclude=True)


class Open(BaseModel, extra="allow"):
    x: int


@dataclass
class Pair:
    left: Any
    right: Any


@pydantic_dataclass
class Row:
    cost: Decimal


READABLE = [
    (datetime(2024, 2, 29, 12, 30, tzinfo=timezone.utc), "2024-02-29T12:30:00+00:00"),
    (datetime(2024, 2, 29, 12, 30, 0, 5), "2024-02-29T12:30:00.000005"),
    (date(2024, 2, 29), "2024-02-29"),
    (time(12, 30), "12:30:00"),
    (timedelta(days=1, milliseconds=500), 86400.5),
    (Decimal("1.10"), "1.10"),
    (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    ({3, 1, 2}, [1, 2, 3]),
    (frozenset({"b", "a"}), ["a", "b"]),
    ({"b", 1, None}, ["b", 1, None]),
    ((1, (2,)), [1, [2]]),
    (b"\x00\xff", "AP8="),
    (bytearray(b"a"), "YQ=="),
    (memoryview(b"a"), "YQ=="),
    (Colour.RED, "red"),
    (Colour.SIZES, [1, 2]),
    (Level.HIGH, 3),
    (Name.ANN, "ann"),
    (Point(x=float("nan"), when=date(2024, 2, 29), client=object()), {"x": "NaN", "when": "2024-02-29"}),
    (Open(x=1, y=b"a"), {"x": 1, "y": "YQ=="}),
    (
        Document("text", metadata={"at": date(2024, 2, 29)}),
        {"id": None, "metadata": {"at": "2024-02-29"}, "page_content": "text", "type": "Document"},
    ),
    (Pair(1, Pair({2}, None)), {"left": 1, "right": {"left": [2], "right": None}}),
    (Row(Decimal("2.50")), {"cost": "2.50"}),
    (float("nan"), "NaN"),
    (float("inf"), "Infinity"),
    (float("-inf"), "-Infinity"),
    ({1: "a", 2.5: "b", None: "c", False: "d"}, {"1": "a", "2.5": "b", "null": "c", "false": "d"}),
    ({date(2024, 2, 29): 1, UUID(int=1): 2}, {"2024-02-29": 1, "00000000-0000-0000-0000-000000000001": 2}),
    ({Colour.RED: 1, Level.HIGH: 2, Name.ANN: 3, b"a": 4}, {"red": 1, "3": 2, "ann": 3, "YQ==": 4}),
]


@pytest.mark.parametrize(("value", "form"), READABLE)
def test_a_value_that_json_lacks_becomes_its_readable_form(value: Any, form: Any) -> None:
    message = AIMessage("exact \u00e9", additional_kwargs={"before": 1e22, "value": value, "after": "\x00"})
    loaded = round_trip(message)
    assert loaded.content == "exact \u00e9"
    assert repr(loaded.additional_kwargs) == repr({"before": 1e22, "value": form, "after": "\x00"})
    assert json.loads(to_json_text(value, path="value")) == form


@given(json_values)
def test_plain_json_is_written_exactly(value: Any) -> None:
    text = to_json_text(value, path="value")
    assert text == json.dumps(value)
    assert repr(json.loads(text)) == repr(value)


@given(json_values)
def test_a_value_that_json_lacks_does_not_change_its_neighbours(value: Any) -> None:
    text = to_json_text({"value": value, "at": date(2024, 2, 29)}, path="value")
    assert text == json.dumps({"value": value, "at": "2024-02-29"})


def test_plain_json_is_written_without_a_walk_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    message = AIMessage(
        "",
        id="1",
        tool_calls=[{"name": "f", "args": {"rows": [{"a": [1]}] * 300}, "id": "c"}],
        additional_kwargs={"k": 1},
    )
    monkeypatch.setattr(serialization, "_plain", None)
    same(round_trip(message), message)


class Client:
    """An object that no message can hold."""


def looped() -> dict[str, Any]:
    loop: dict[str, Any] = {"items": [0]}
    loop["items"].append(loop)
    return loop


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("kwargs", "place", "reason"),
    [
        ({"client": {"pool": [1, 2, 3, Client()]}}, "['client']['pool'][3]", "of type Client has no JSON form"),
        ({"when": Point(x=1, when=date.min, client=None), "o": Pair(0, Pair)}, "['o'].right", "of type type has no"),
        ({"config": Open(x=1, key=SecretStr("hunter2"))}, "['config'].key", "a secret is never stored"),
        ({"it's": Client()}, '["it\'s"]', "no JSON form"),
        ({"ids": {1: "a", "1": "b"}}, "['ids']['1']", "another key of the same dict also becomes this text"),
        ({"ids": {True: "a", "true": "b"}}, "['ids']['true']", "another key"),
        ({"ids": {(1, 2): "a"}}, "['ids'][(1, 2)]", "a tuple cannot be a key"),
        ({"loop": looped()}, "['loop']['items'][1]", "contains itself"),
        ({"deep": nested(200)}, "['deep']" + "[0]" * 199, "nested more than 200 levels deep"),
        ({"deep": nested(20_000)}, "['deep']" + "[0]" * 199, "nested more than 200 levels deep"),
        ({"big": 10**5000}, "['big']", "an integer too long"),
        ({"tags": {Client()}}, "['tags'][0]", "no JSON form"),
    ],
)
def test_what_has_no_json_form_is_refused_with_its_place(kwargs: dict[str, Any], place: str, reason: str) -> None:
    message = HumanMessage("a", additional_kwargs=kwargs)
    with pytest.raises(MessageNotStorableError, match=reason) as error:
        to_stored(message, path="messages[1]")
    assert error.value.path == f"messages[1].additional_kwargs{place}"
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize(
    ("message", "path"),
    [
        (ToolMessage("a", tool_call_id="c", artifact=[Client()]), "message.artifact[0]"),
        (
            AIMessage("", tool_calls=[{"name": "f", "args": {"x": Client()}, "id": "c"}]),
            "message.tool_calls[0]['args']['x']",
        ),
        (HumanMessage([{"type": "x", "x": Client()}]), "message.content[0]['x']"),
        (HumanMessage("a", note=Client()), "message.note"),
        (HumanMessage("a", response_metadata={"x": Client()}), "message.response_metadata['x']"),
    ],
)
def test_every_field_of_a_message_is_named_by_its_own_path(message: BaseMessage, path: str) -> None:
    with pytest.raises(MessageNotStorableError) as error:
        to_stored(message)
    assert error.value.path == path


def test_two_hundred_levels_can_be_stored() -> None:
    kwargs = {"deep": nested(199)}
    assert round_trip(HumanMessage("a", additional_kwargs=kwargs)).additional_kwargs == kwargs
    wide = {"wide": [[]] * 1000, "at": date(2024, 2, 29)}
    assert round_trip(HumanMessage("a", additional_kwargs=wide)).additional_kwargs == {**wide, "at": "2024-02-29"}


def test_the_same_value_in_two_places_is_no_loop() -> None:
    shared = {"at": date(2024, 2, 29)}
    kwargs = {"one": shared, "two": [shared, shared]}
    assert json.loads(to_json_text(kwargs, path="k"))["two"] == [{"at": "2024-02-29"}] * 2


def test_postgresql_takes_the_json_and_gives_it_back_unchanged(admin: Any) -> None:
    message = AIMessage(
        "\x00\ud800",
        additional_kwargs={"k\x00\udfff": ["\x00", 1e22, -0.0, 1e300, float("nan"), 10**300, "😀", "\\u0000"]},
    )
    stored = to_stored(message)
    with admin.cursor() as cursor:
        cursor.execute(
            "select (%s::text)::text, (%s::json)::text, (%s::json)::text",
            (stored.content, stored.additional_kwargs, stored.extra),
        )
        assert cursor.fetchone() == (stored.content, stored.additional_kwargs, stored.extra)


# --- rows of other writers ---


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StoredMessage("human", "a", extra='{"later": {"x": 1}}'), HumanMessage("a", later={"x": 1})),
        (StoredMessage("ai", "a", extra='{"type": "AIMessageChunk"}'), AIMessage("a")),
        (StoredMessage("tool", "a"), ToolMessage("a", tool_call_id="")),
        (StoredMessage("tool", "a", extra='{"status": "error"}'), ToolMessage("a", tool_call_id="", status="error")),
        (StoredMessage("function", "a"), FunctionMessage("a", name="")),
        (StoredMessage("chat", "a"), ChatMessage("a", role="chat")),
        (StoredMessage("remove", ""), RemoveMessage(id="")),
        (StoredMessage("human", "a", additional_kwargs="{}", extra="{}"), HumanMessage("a")),
    ],
)
def test_rows_with_missing_or_unknown_fields_load(
    row: StoredMessage, message: BaseMessage, caplog: pytest.LogCaptureFixture
) -> None:
    same(to_message(row), message)
    assert warnings_of(caplog) == []


def test_an_unknown_role_becomes_a_chat_message_of_that_role_and_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    row = StoredMessage("observer", "I see.", extra='{"id": "1", "seen": 2}')
    same(to_message(row), ChatMessage("I see.", role="observer", id="1", seen=2))
    assert warnings_of(caplog) == ["a stored message has the unknown role 'observer': it is read as a ChatMessage"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (StoredMessage("human", "a", extra='{"id": '), HumanMessage("a")),
        (StoredMessage("human", "a", extra='{"id": ["private"]}'), HumanMessage("a")),
        (StoredMessage("human", "a", extra="[]"), HumanMessage("a")),
        (StoredMessage("ai", "a", extra='{"tool_calls": "private"}'), AIMessage("a")),
        (StoredMessage("ai", "a", extra='{"tool_calls": ["private"]}'), AIMessage("a")),
        (StoredMessage("ai", "a", extra='{"tool_calls": {}}'), AIMessage("a")),
        (StoredMessage("ai", "a", extra='{"usage_metadata": "private"}'), AIMessage("a")),
        (StoredMessage("ai", "a", additional_kwargs='["private"]'), AIMessage("a")),
        (StoredMessage("tool", "a", extra='{"tool_call_id": {}}'), ToolMessage("a", tool_call_id="")),
        (StoredMessage("system", "a", extra='{"content": 5}'), SystemMessage("a")),
    ],
)
def test_a_row_that_does_not_fit_becomes_its_readable_content_and_one_warning(
    row: StoredMessage, message: BaseMessage, caplog: pytest.LogCaptureFixture
) -> None:
    same(to_message(row), message)
    (warning,) = warnings_of(caplog)
    assert type(message).__name__ in warning
    assert "private" not in warning


field_names = st.sampled_from(
    ["content", "id", "name", "type", "role", "tool_calls", "invalid_tool_calls", "usage_metadata", "response_metadata"]
    + ["additional_kwargs", "artifact", "status", "tool_call_id", "example", "content_blocks", "self"]
)


@given(
    st.sampled_from(["human", "ai", "system", "tool", "function", "chat", "remove", "observer", ""]),
    st.text(max_size=5),
    st.none() | json_values.map(json.dumps) | st.text(max_size=5),
    st.none()
    | st.dictionaries(field_names | texts, json_values, max_size=3).map(json.dumps)
    | json_values.map(json.dumps)
    | st.text(max_size=5),
)
@settings(max_examples=500)
def test_no_row_makes_a_conversation_unreadable(
    role: str, content: str, additional_kwargs: str | None, extra: str | None
) -> None:
    message = to_message(StoredMessage(role, content, additional_kwargs, extra))
    assert isinstance(message.content, (str, list))
    assert message == message and repr(message)


# --- both lines ---


def golden_messages() -> list[tuple[BaseMessage, BaseMessage]]:
    """Return messages of every kind, each with what its row loads as."""
    invalid = AIMessage("")
    # Not through the constructor: the lines order the keys of an invalid call each in their own way.
    invalid.invalid_tool_calls = [{"name": "f", "args": "{", "id": None, "error": "no JSON"}]
    exact: list[BaseMessage] = [
        HumanMessage("Hello"),
        HumanMessage("Grüße \ud83d \x00 😀", id="1", name="Ann"),
        HumanMessage(
            [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "https://x/y"}}]
        ),
        HumanMessage("As an example", example=True, zeta=1, alpha=[2.0]),
        AIMessage("", tool_calls=[{"name": "f", "args": {"zeta": 1, "a": -0.0, "lc": CONSTRUCTOR}, "id": "c1"}]),
        AIMessage("", additional_kwargs={"function_call": {"name": "f", "arguments": '{"x": 1}'}}),
        AIMessage(
            "Done.",
            id="run-1",
            name="guide",
            example=True,
            usage_metadata={"input_tokens": 1, "output_tokens": 2, "total_tokens": 3},
            response_metadata={"finish_reason": "stop", "model_name": "m"},
            note="extra",
        ),
        invalid,
        AIMessage("", additional_kwargs={"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]}),
        SystemMessage("Be kind.", response_metadata={"f": 1e22}),
        ToolMessage("no", tool_call_id="c1", name="f", status="error", artifact={"rows": [1, None]}, id="2"),
        FunctionMessage("42", name="f"),
        ChatMessage("Too long.", role="critic"),
        RemoveMessage(id="1"),
    ]
    chunk = AIMessageChunk("a", id="1", tool_call_chunks=[{"name": "f", "args": "{}", "id": "c", "index": 0}])
    converted: list[tuple[BaseMessage, BaseMessage]] = [
        (HumanMessage("Hello", example=False), HumanMessage("Hello")),
        (chunk, AIMessage("a", id="1", tool_calls=[{"name": "f", "args": {}, "id": "c"}])),
        (
            ToolMessage("2 found", tool_call_id="c1", artifact=[value for value, _ in READABLE]),
            ToolMessage("2 found", tool_call_id="c1", artifact=[form for _, form in READABLE]),
        ),
    ]
    return [(message, message) for message in exact] + converted


def golden_rows() -> list[dict[str, str | None]]:
    return [
        {"role": row.role, "content": row.content, "additional_kwargs": row.additional_kwargs, "extra": row.extra}
        for row in (to_stored(message) for message, _ in golden_messages())
    ]


def test_both_lines_write_the_same_rows() -> None:
    assert golden_rows() == json.loads(GOLDEN_ROWS.read_text(encoding="ascii"))


def test_both_lines_load_the_same_rows_equal() -> None:
    rows = [StoredMessage(**row) for row in json.loads(GOLDEN_ROWS.read_text(encoding="ascii"))]
    for row, (_, loaded) in zip(rows, golden_messages(), strict=True):
        assert type(to_message(row)) is type(loaded)
        assert to_message(row) == loaded


if __name__ == "__main__":
    GOLDEN_ROWS.write_text(json.dumps(golden_rows(), indent=1) + "\n", encoding="ascii")

"""Messages to the text of a prompt, the same in both LangChain lines."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
    get_buffer_string,
)

from pgmemory.formats import as_json, as_text, as_xml, text_of

IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
CONVERSATION: list[BaseMessage] = [
    SystemMessage("Be <kind>."),
    HumanMessage([{"type": "text", "text": "Flights to Malmö & back?"}, IMAGE], name="Ann"),
    RemoveMessage(id="1"),
    AIMessage(
        "I look.",
        tool_calls=[
            {"name": "search", "args": {"to": "Malmö", "days": [1, 2.5, None]}, "id": "c1"},
            {"name": "now", "args": {}, "id": None},
        ],
    ),
    ToolMessage("2 found", tool_call_id="c1", name="search"),
    AIMessage("", additional_kwargs={"function_call": {"name": "book", "arguments": '{"seat":"12A"}'}}),
    FunctionMessage("booked", name="book"),
    ChatMessage("Too fast.", role="critic"),
    AIMessage("Done."),
]


def test_text_shows_one_line_a_message_with_tool_calls_after_the_text() -> None:
    assert as_text(CONVERSATION) == (
        "System: Be <kind>.\n"
        "Human: Flights to Malmö & back?\n"
        'AI: I look. [calls search({"to": "Malmö", "days": [1, 2.5, null]}), now({})]\n'
        "Tool: 2 found\n"
        'AI: [calls book({"seat": "12A"})]\n'
        "Function: booked\n"
        "critic: Too fast.\n"
        "AI: Done."
    )


def test_xml_shows_one_element_a_message() -> None:
    assert as_xml(CONVERSATION) == (
        '<message role="System">Be &lt;kind&gt;.</message>\n'
        '<message role="Human" name="Ann">Flights to Malmö &amp; back?</message>\n'
        '<message role="AI">I look.'
        '<tool_call name="search" id="c1">{"to": "Malmö", "days": [1, 2.5, null]}</tool_call>'
        '<tool_call name="now">{}</tool_call></message>\n'
        '<message role="Tool" name="search" tool_call_id="c1">2 found</message>\n'
        '<message role="AI"><tool_call name="book">{"seat": "12A"}</tool_call></message>\n'
        '<message role="Function" name="book">booked</message>\n'
        '<message role="critic">Too fast.</message>\n'
        '<message role="AI">Done.</message>'
    )


def test_json_shows_one_object_a_message() -> None:
    shown = as_json(CONVERSATION)
    assert "Malmö" in shown
    assert json.loads(shown) == [
        {"role": "System", "content": "Be <kind>."},
        {"role": "Human", "content": "Flights to Malmö & back?", "name": "Ann"},
        {
            "role": "AI",
            "content": "I look.",
            "tool_calls": [
                {"name": "search", "args": {"to": "Malmö", "days": [1, 2.5, None]}, "id": "c1"},
                {"name": "now", "args": {}},
            ],
        },
        {"role": "Tool", "content": "2 found", "name": "search", "tool_call_id": "c1"},
        {"role": "AI", "content": "", "tool_calls": [{"name": "book", "args": {"seat": "12A"}}]},
        {"role": "Function", "content": "booked", "name": "book"},
        {"role": "critic", "content": "Too fast."},
        {"role": "AI", "content": "Done."},
    ]


def test_no_messages_give_nothing() -> None:
    for messages in ([], [RemoveMessage(id="1")]):
        assert (as_text(messages), as_xml(messages), as_json(messages)) == ("", "", "[]")


def test_the_prefixes_name_the_human_and_the_ai() -> None:
    messages = [HumanMessage("Hello"), AIMessage("Hi"), SystemMessage("s")]
    assert as_text(messages, "Client", "Guide") == "Client: Hello\nGuide: Hi\nSystem: s"
    assert as_xml(messages[:2], 'A "B"', "G&H") == (
        '<message role=\'A "B"\'>Hello</message>\n<message role="G&amp;H">Hi</message>'
    )
    assert [shown["role"] for shown in json.loads(as_json(messages, "Client", "Guide"))] == [
        "Client",
        "Guide",
        "System",
    ]


# --- every text ---

texts = st.text(st.one_of(st.characters(), st.sampled_from("\x00\r\n\t<&>\"']{}\ud800\ufffe")), max_size=10)
blocks = st.one_of(texts, st.builds(lambda text: {"type": "text", "text": text}, texts), st.just(IMAGE))
contents = st.one_of(texts, st.lists(blocks, max_size=3))
plain_messages = st.one_of(
    st.builds(HumanMessage, contents),
    st.builds(AIMessage, contents),
    st.builds(AIMessageChunk, contents),
    st.builds(SystemMessage, contents),
    st.builds(ToolMessage, contents, tool_call_id=texts, name=texts),
    st.builds(FunctionMessage, contents, name=texts),
    st.builds(ChatMessage, contents, role=texts),
)
calling_messages = st.builds(
    lambda text, name, value: AIMessage(text, tool_calls=[{"name": name, "args": {name: value}, "id": name}]),
    contents,
    texts,
    texts,
)
conversations = st.lists(plain_messages | calling_messages, max_size=4)


@given(st.lists(plain_messages, max_size=4), texts, texts)
def test_text_of_plain_messages_is_what_langchain_makes(messages: list[BaseMessage], human: str, ai: str) -> None:
    assert as_text(messages, human, ai) == get_buffer_string(messages, human, ai)


def is_xml(character: str) -> bool:
    """Say whether XML 1.0 can carry the character."""
    return (
        character in "\t\n\r"
        or " " <= character <= "\ud7ff"
        or "\ue000" <= character <= "\ufffd"
        or "\U00010000" <= character
    )


@given(conversations, texts, texts)
def test_xml_is_well_formed_and_keeps_every_character_that_xml_can_carry(
    messages: list[BaseMessage], human: str, ai: str
) -> None:
    shown = as_xml(messages, human, ai)
    root = ElementTree.fromstring(f"<root>{shown}</root>".encode())
    assert len(root) == len(messages)
    for element, message in zip(root, messages, strict=True):
        assert (element.text or "") == "".join(c if is_xml(c) else "\ufffd" for c in text_of(message))


@given(conversations, texts, texts)
def test_json_is_valid_and_can_be_encoded_whatever_the_text(messages: list[BaseMessage], human: str, ai: str) -> None:
    shown = json.loads(as_json(messages, human, ai).encode())
    assert len(shown) == len(messages)
    for entry, message in zip(shown, messages, strict=True):
        assert entry["content"] == json.loads(json.dumps(text_of(message)))
        if isinstance(message, AIMessage) and message.tool_calls:
            assert entry["tool_calls"][0]["args"] == json.loads(json.dumps(message.tool_calls[0]["args"]))


# --- the odd cases ---


def test_what_a_form_cannot_carry_is_escaped() -> None:
    hostile = '</message>\r\x00\ud800\x0b\uffff&"\n😀'
    message = AIMessage(hostile, tool_calls=[{"name": hostile, "args": {"x": hostile}, "id": hostile}])
    carried = '</message>\r\ufffd\ufffd\ufffd\ufffd&"\n😀'
    element = ElementTree.fromstring(as_xml([message], ai_prefix=hostile))
    assert (element.text, element.get("role")) == (carried, carried)
    (call,) = element
    assert (call.get("name"), call.get("id")) == (carried, carried)
    assert json.loads(call.text or "") == {"x": hostile.replace("\uffff", "\ufffd")}
    (shown,) = json.loads(as_json([message], ai_prefix=hostile).encode())
    assert shown == {
        "role": hostile,
        "content": hostile,
        "tool_calls": [{"name": hostile, "args": {"x": hostile}, "id": hostile}],
    }


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ([], ""),
        (["a", {"type": "text", "text": "b"}, IMAGE, {"type": "text", "text": None}, {"text": "c"}], "ab"),
    ],
)
def test_the_text_of_a_message_is_its_text_blocks(content: Any, text: str) -> None:
    for message in (HumanMessage(content), AIMessage(content), ToolMessage(content, tool_call_id="c")):
        assert text_of(message) == text
        assert type(text_of(message)) is str


@pytest.mark.parametrize(
    ("function_call", "shown"),
    [
        ({"name": "f", "arguments": "no JSON"}, 'AI: [calls f("no JSON")]'),
        ({"name": "f"}, "AI: [calls f(null)]"),
        ({"name": "f", "arguments": {"x": 1}}, 'AI: [calls f({"x": 1})]'),
        ("odd", "AI: "),
        (None, "AI: "),
    ],
)
def test_an_odd_function_call_is_shown_as_it_is(function_call: Any, shown: str) -> None:
    message = AIMessage("", additional_kwargs={"function_call": function_call})
    assert as_text([message]) == shown
    assert as_xml([message]) and as_json([message])


def test_tool_calls_are_shown_rather_than_the_function_call_beside_them() -> None:
    call: Any = {"name": "f", "args": {}, "id": "1"}
    message = AIMessage("", tool_calls=[call], additional_kwargs={"function_call": {"name": "g", "arguments": "{}"}})
    assert as_text([message]) == "AI: [calls f({})]"


def test_a_message_of_no_known_class_is_shown_under_its_type() -> None:
    assert as_text([BaseMessage("a", type="observer")]) == "observer: a"

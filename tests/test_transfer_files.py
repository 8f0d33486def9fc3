"""Files to import: wrong ones are refused with the line, OpenAI's messages come in and go out."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from conversations import ai, human
from test_serialization import golden_messages
from transfers import exported, imported, said

from pgmemory import ConfigurationError, ConversationStore, PostgresChatMessageHistory
from pgmemory.transfer import (
    ImportReport,
    JsonLines,
    OpenAIMessages,
    Source,
    export_conversations,
    import_conversations,
)

GOLDEN = [message for message, _ in golden_messages()]
STATE = {
    "tenant_id": "", "user_id": "", "session_id": "s", "metadata": "{}", "next_message_index": 2,
    "summarized_through": -1, "keeps_summary": False, "revision": 0, "created_at": "2024-01-01T00:00:00+00:00",
    "updated_at": "2024-01-01T00:00:00+00:00", "time_to_live": None, "held_at": None, "hold_reason": None,
}  # fmt: skip
MESSAGE = {
    "message_index": 0, "role": "human", "content": "Hi", "additional_kwargs": None, "extra": None, "tags": None,
    "judged_by": None, "token_count": None, "token_encoding": None, "write_id": None,
    "created_at": "2024-01-01T00:00:00+00:00",
}  # fmt: skip
HEADER = {"format": "pgmemory conversations", "version": 1}
END = {"end": {"conversations": 1, "messages": 1}}


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def read(source: Source) -> None:
    """Read a source to its end."""
    for conversation in source.conversations(lambda place, reason: None, None):
        for _ in conversation.messages:
            pass


def state(**changed: Any) -> dict[str, Any]:
    return {"conversation": {**STATE, **changed}}


def message(**changed: Any) -> dict[str, Any]:
    return {"message": {**MESSAGE, **changed}}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"", "line 1: no header"),
        (lines({"messages": []}), "line 1"),
        (lines({**HEADER, "version": 2}), "version 2 of the format"),
        (lines(HEADER), "before the end"),
        (lines(HEADER, state(), message()), "line 3, before the end"),
        (lines(HEADER, state(), message(), END)[:-20], "line 4 is not JSON"),
        (lines(HEADER, state(), {**END, "end": {"conversations": 2, "messages": 1}}), "line 3: other numbers"),
        (lines(HEADER, state(), message(), END, state()), "line 5: more after the end"),
        (lines(HEADER, message()), "line 2 is none that belongs here"),
        (lines(HEADER, state(), message(), {"summary": {}}), "line 4 is none that belongs here"),
        (lines(HEADER, state(), message(), HEADER), "line 4 is none that belongs here"),
        (lines(HEADER, state(), {"nonsense": 1}), "line 3 is none that belongs here"),
        (lines(HEADER, [state()]), "line 2 is none that `pgmemory export` writes"),
        (lines(HEADER) + b"\xff\n", "line 2 is not UTF-8"),
        (lines(HEADER) + b"[" * 100_000 + b"\n", "line 2 is not JSON"),
        (lines(HEADER, state(more=1)), "line 2: must hold tenant_id"),
        (lines(HEADER, state(metadata="{")), "line 2: metadata"),
        (lines(HEADER, state(session_id=7)), "line 2: session_id"),
        (lines(HEADER, state(revision=True)), "line 2: revision"),
        (lines(HEADER, state(keeps_summary=0)), "line 2: keeps_summary"),
        (lines(HEADER, state(created_at="yesterday")), "line 2: created_at"),
        (lines(HEADER, state(updated_at="2024-01-01T00:00:00")), "line 2: updated_at has no time zone"),
        (lines(HEADER, state(time_to_live="a month")), "line 2: time_to_live"),
        (lines(HEADER, state(held_at=1)), "line 2: held_at"),
        (
            lines(HEADER, state(), {"summary": {"covers_through": -1, "content": "", "created_at": ""}}),
            "line 3: covers",
        ),
        (lines(HEADER, state(), message(content="\0")), "line 3: content"),
        (lines(HEADER, state(), message(content="\ud83d")), "line 3: content"),
        (lines(HEADER, state(), message(role=None)), "line 3: role"),
        (lines(HEADER, state(), message(extra="{'a': 1}")), "line 3: extra"),
        (lines(HEADER, state(), message(extra='{"a": NaN}')), "line 3: extra"),
        (lines(HEADER, state(), message(additional_kwargs={})), "line 3: additional_kwargs"),
        (lines(HEADER, state(), message(tags="a")), "line 3: tags"),
        (lines(HEADER, state(), message(tags=[1])), "line 3: tags"),
        (lines(HEADER, state(), message(write_id="x")), "line 3: write_id"),
        (lines(HEADER, state(), message(token_count=2**31)), "line 3: token_count"),
        (lines(HEADER, state(), message(message_index=-1)), "line 3: message_index"),
        (lines(HEADER, state(), message(message_index=2)), "line 3: message_index 2 is not in order"),
        (lines(HEADER, state(), message(), message()), "line 4: message_index 0 is not in order"),
        (lines(HEADER, state(summarized_through=2)), "line 2: summarized_through is no whole number from -1 to 1"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(file: bytes, text: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        read(JsonLines(io.BytesIO(file)))
    assert text in str(refused.value)
    assert "Hi" not in str(refused.value)


def test_a_value_that_the_database_refuses_is_named_by_its_line(store: ConversationStore) -> None:
    with pytest.raises(ConfigurationError, match="line 2: the database refused a value"):
        imported(store, lines(HEADER, state(time_to_live="PDD"), message(), END))
    assert store.list_conversations() == []


def test_a_conversation_that_cannot_have_its_name_is_skipped_or_with_strict_an_error(store: ConversationStore) -> None:
    file = lines(HEADER, state(session_id=""), message(), END)
    report = imported(store, file)
    assert (report.skipped, report.messages, report.findings[0].place) == (1, 0, "line 2")
    assert report.findings[0].reason == "session_id must not be empty (1 messages)"
    with pytest.raises(ConfigurationError, match="line 2: session_id must not be empty"):
        imported(store, file, strict=True)


# --- OpenAI's form ---------------------------------------------------------------------------------------------------


def openai(store: ConversationStore, document: Any, **options: Any) -> ImportReport:
    file = document if isinstance(document, bytes) else json.dumps(document).encode()
    names = {name: options.pop(name) for name in ("session_id", "user_id") if name in options}
    return import_conversations(store, OpenAIMessages(io.BytesIO(file), **names), **options)


CALL = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"q": "x"}'}}
CHAT: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Where?", "name": "ann"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "found", "tool_call_id": "c1"},
    {"role": "assistant", "content": [{"type": "text", "text": "Here."}]},
    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://x/y"}}]},
    {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    {"role": "function", "name": "f", "content": "42"},
    {"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "find", "arguments": '{"q": '}}]},
    {"role": "critic", "content": "Too long."},
]


@pytest.mark.parametrize(
    "document",
    [
        {"messages": CHAT},
        [{"messages": CHAT}],
        json.dumps(CHAT, indent=2).encode(),
        b"\n \r\n" + json.dumps(CHAT, indent=2).encode(),
        lines({"messages": CHAT}) + b"\n",
        b"\n" + lines({"messages": CHAT}),
    ],
    ids=["object", "list of objects", "a list of several lines", "blank lines before it", "lines", "blank and lines"],
)
def test_openai_messages_come_in_and_go_out_as_they_were(store: ConversationStore, document: Any) -> None:
    report = openai(store, document, session_id="s", user_id="u")
    assert (report.messages, report.skipped) == (len(CHAT), 0)
    first, *_, last = said(store, "s", "u")
    assert (first.type, last.type, last.role) == ("system", "chat", "critic")
    (line,) = exported(store, format="openai").splitlines()
    out = json.loads(line)
    assert (out["session_id"], out["user_id"]) == ("s", "u")

    def without_nothing(form: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in form.items() if value not in (None, "")}

    forms = list(map(without_nothing, out["messages"]))
    assert forms[5]["content"] in ("Here.", [{"type": "text", "text": "Here."}])
    forms[5] = CHAT[5]
    assert forms == list(map(without_nothing, CHAT))
    assert openai(store, document, session_id="s", user_id="u").already_there == len(CHAT)


def test_an_export_in_openai_s_form_leaves_out_what_it_has_no_form_for(store: ConversationStore) -> None:
    PostgresChatMessageHistory("s", store).add_messages(GOLDEN)
    file = io.BytesIO()
    report = export_conversations(store, file, format="openai")
    (line,) = file.getvalue().splitlines()
    assert len(json.loads(line)["messages"]) == report.messages == len(GOLDEN) - 1
    assert report.left_out == 1  # a RemoveMessage
    assert b"\\ud83d \\u0000" in line


def test_lines_of_openai_messages_name_their_conversations(store: ConversationStore) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    file = lines(
        {"session_id": "a", "user_id": "u", "messages": hi}, {"messages": hi}, {"session_id": "b", "messages": hi}
    )
    openai(store, file, session_id="c", user_id="v")
    names = {(found.user_id, found.session_id) for found in store.list_conversations()}
    assert names == {("u", "a"), ("v", "c"), ("v", "b")}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        (b"{", "neither a JSON document nor JSON Lines"),
        (b"\xff", "neither a JSON document nor JSON Lines"),
        (b"[" * 100_000, "neither a JSON document nor JSON Lines"),
        (lines({"session_id": "s", "messages": []}) + b"{", "line 2 is not JSON"),
        (lines({"messages": []}), "line 1: no session_id"),
        (lines({"session_id": "s", "messages": 1}), "line 1: neither"),
        (lines("hello"), "line 1: neither"),
        (lines({"role": "user", "content": "Hi"}), "line 1: neither"),
    ],
)
def test_a_wrong_file_of_openai_messages_is_refused(file: bytes, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        read(OpenAIMessages(io.BytesIO(file)))


def test_two_conversations_without_a_name_are_refused() -> None:
    file = lines({"messages": []}, {"messages": []})
    with pytest.raises(ConfigurationError, match="line 2: a second conversation without session_id"):
        read(OpenAIMessages(io.BytesIO(file), session_id="s"))


ODD: list[Any] = [
    "text",
    {"content": "no role"},
    {"role": "user"},
    {"role": "user", "content": 7},
    {"role": "tool", "content": "no id"},
    {"role": "assistant", "content": "", "tool_calls": {"a": 1}},
    {"role": "assistant", "content": "", "tool_calls": ["secret"]},
    {"role": "assistant", "content": "", "tool_calls": [{"nonsense": "secret"}]},
]


def test_odd_messages_are_reported_and_stop_nothing_unless_strict(store: ConversationStore) -> None:
    document = [{"role": "user", "content": "Hi"}, *ODD, {"role": "assistant", "content": "Hello"}]
    report = openai(store, document, session_id="s")
    assert (report.messages, report.skipped, report.succeeded) == (2, len(ODD), True)
    assert [finding.place for finding in report.findings] == [f"line 1, message {n}" for n in range(2, len(ODD) + 2)]
    assert "secret" not in repr(report.findings)
    assert said(store) == [human("Hi"), ai("Hello")]
    assert [row.message_index for row in store.list_messages("s")] == [0, 1]
    with pytest.raises(ConfigurationError, match="line 1, message 2: no JSON object with a role"):
        openai(store, document, session_id="t", strict=True)
    assert store.get_conversation("t") is None


def test_what_is_missing_in_an_odd_message_is_said(store: ConversationStore) -> None:
    odd = [
        {"role": "tool", "content": "found"},
        {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": "secret"}]},
    ]
    report = openai(store, odd, session_id="s")
    assert [finding.reason for finding in report.findings] == [
        "no tool_call_id",
        "a tool call that names neither a function nor a custom tool",
    ]


def test_a_custom_tool_s_call_keeps_its_name_its_id_and_its_text(store: ConversationStore) -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "run", "input": "print(1)"}}
    result = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    report = openai(store, [{"role": "assistant", "content": None, "tool_calls": [call]}, result], session_id="s")
    assert (report.messages, report.findings) == (2, [])
    calling, answer = said(store)
    assert (
        calling.tool_calls == [{"name": "run", "args": {"__arg1": "print(1)"}, "id": "c1", "type": "tool_call"}]
        and answer.tool_call_id == "c1"
    )


# --- Numbers ---------------------------------------------------------------------------------------------------------


class Miscounting(JsonLines):
    """Gives a message less than it says."""

    def conversations(self, *arguments: Any) -> Any:
        yield from super().conversations(*arguments)
        self.rows += 1


def test_every_message_of_the_source_is_accounted_for_or_the_import_fails(store: ConversationStore) -> None:
    hi = {"role": "user", "content": "Hi"}
    document = [
        {"session_id": "good", "messages": [hi, "odd", hi]},
        {"session_id": "", "messages": [hi, hi, "odd"]},
        {"session_id": "other", "messages": [hi, hi]},
    ]
    PostgresChatMessageHistory("other", store).add_messages([human("another one")])
    report = openai(store, document)
    assert (report.messages, report.skipped, report.in_conflicts, report.total) == (2, 4, 2, 8)
    assert (report.conflicts, report.disagreements) == (1, 0)
    again = openai(store, document)
    assert (again.already_there, again.skipped, again.in_conflicts, again.total) == (2, 4, 2, 8)
    file = exported(store, session_id="good")
    report = import_conversations(store, Miscounting(io.BytesIO(file)))
    assert (report.succeeded, report.disagreements) == (False, 1)
    assert report.findings[0].reason == "it gave 3 messages, and 2 are accounted for"

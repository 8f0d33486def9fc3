"""Redaction: what the ready function finds and leaves alone, and that nothing else of a turn is kept anywhere."""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import logging
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import Enum
from typing import Any

import pytest
from chains import AgentExecutor, ConversationChain, create_tool_calling_agent
from fakes import scripted
from hypothesis import example, given
from hypothesis import strategies as st
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, FunctionMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.tools import tool
from pydantic import BaseModel, ConfigDict

from pgmemory import (
    BufferMemory,
    ConfigurationError,
    ConversationStore,
    MessageNotStorableError,
    PostgresChatMemory,
    PostgresChatMessageHistory,
    RelevantTurnMemory,
    StoreUnavailableError,
    SummaryMemory,
    TokenWindowMemory,
    redact_personal_data,
)
from pgmemory.serialization import to_message, to_stored
from pgmemory.turns import bonds_of

MAIL, PHONE, CARD = "jane.doe@example.org", "+49 30 1234567", "4111 1111 1111 1111"


def redacted(text: str) -> str:
    (message,) = redact_personal_data([HumanMessage(text)])
    assert isinstance(message.content, str)
    return message.content


# --- What is found in text -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail jane@example.org.", "mail [email]."),
        ("<jane.doe+tag@mail.example.co.uk>", "<[email]>"),
        ("(jane@example.org),", "([email]),"),
        ("'jane@example.org'", "'[email]'"),
        ("o'brien@example.org", "[email]"),
        ("JANE_DOE-7@EXAMPLE.ORG", "[email]"),
        ('"jane doe"@example.org', "[email]"),
        ("mailto:jane@example.org?subject=x", "mailto:[email]?subject=x"),
        ("https://example.org/?m=jane@example.org&b=1", "https://example.org/?m=[email]&b=1"),
        ("m=jane%40example.org", "m=[email]"),
        ("jane@[192.168.0.1]", "[email]"),
        ("jörg.müller@exämple.de", "[email]"),
        ("用户@例子.广告", "[email]"),
        ("संपर्क@डाटामेल.भारत", "[email]"),
        ("a@xn--e1afmkfd.xn--p1ai", "[email]"),
        ("jane＠example.org", "[email]"),
        ("请联系jane@example.org谢谢", "请联系[email]谢谢"),
        ("a@example.org,b@example.org;c@example.org", "[email],[email];[email]"),
        # Cards
        ("4111 1111 1111 1111", "[card]"),
        ("4111-1111-1111-1111 12/26 123", "[card] 12/26 123"),
        ("4111\u00a01111\u202f1111\u20111111", "[card]"),
        ("card:4111111111111111,123", "card:[card],123"),
        ("card_4111111111111111.", "card_[card]."),
        ("卡号4111111111111111是", "卡号[card]是"),
        ("４１１１１１１１１１１１１１１１", "[card]"),
        ("3782 822463 10005", "[card]"),
        ("378282246310005 and 6011000990139424", "[card] and [card]"),
        ("4222222222222", "[card]"),
        ("6304 0000 0000 0000 000", "[card]"),
        ("order 1234 4111 1111 1111 1111", "order 1234 [card]"),
        # Phones
        ("call +49 30 1234567!", "call [phone]!"),
        ("0049 30 1234567", "[phone]"),
        ("0049301234567", "[phone]"),
        ("+49 (0)30 1234567", "[phone]"),
        ("+1 (555) 123-4567", "[phone]"),
        ("+15551234567", "[phone]"),
        ("\u202a+49\u00a030\u20111234567\u202c", "\u202a[phone]\u202c"),
        ("＋４９ ３０ １２３４５６７", "[phone]"),
        ("(030) 123 45 67", "[phone]"),
        ("030/1234567", "[phone]"),
        ("01711234567", "[phone]"),
        ("01.23.45.67.89", "[phone]"),
        ("06-12-12-12-12", "[phone]"),
        ("044.123.45.67", "[phone]"),
        ("555-123-4567", "[phone]"),
        ("555.123.4567", "[phone]"),
        ("555 123 4567", "[phone]"),
        ("(555) 123-4567", "[phone]"),
        ("1-555-123-4567", "[phone]"),
        ("電話0312345678です", "電話[phone]です"),
        ("my phone number is 5551234567", "my phone number is [phone]"),
        ("Tel.: 1234567", "Tel.: [phone]"),
        ("12 555-123-4567 12 items", "12 [phone] 12 items"),
        ("+49 30 1234567 2024-01-15 10:30", "[phone] 2024-01-15 10:30"),
        ("0171 1234567 10:30", "[phone] 10:30"),
        ("01.02.2024 0171 1234567", "01.02.2024 [phone]"),
        (f"{MAIL}, {PHONE}, {CARD}", "[email], [phone], [card]"),
    ],
)
def test_personal_data_is_found(text: str, expected: str) -> None:
    assert redacted(text) == expected
    assert redacted(expected) == expected


@pytest.mark.parametrize(
    "text",
    [
        "2024-01-15 10:30",
        "2024-01-15T10:30:00.123456+00:00",
        "2024-01-15T10:30:00+0100",
        "20240115T103000Z",
        "20240115103000",
        "2024-01-15-10-30-00",
        "15.01.2024 10.30",
        "01.02.2024-31.12.2024",
        "01/15/2024 and 05-02-2024",
        "01.02.03 04:05:06",
        "01/2024 12345",
        "from 09.30-17.00 on",
        "1990-1999, 2019 2020 2021 2022",
        "1700000000 1700000000003 1700000000000003",
        "550e8400-e29b-41d4-a716-446655440000",
        "12345678-1234-1234-1234-123456789012",
        "d41d8cd98f00b204e9800998ecf8427e 0x4111111111111111",
        "order 1234, 123456, #48213377, 4503172816",
        "4111 1111 1111 1112",
        "12345 67890",
        "$1,299.00, 1.234.567,89 €, 1 234 567",
        "192.168.100.200 10.0.0.1 v1.2.3 2.10.11.4",
        "0.4111111111111111 0.51234567890",
        "978-3-16-148410-0 9783161484100",
        "52.520008, 13.404954",
        "0000 0000 0000 0000",
        "react@18.2.0 lodash@4.x user@localhost @jane me@ @",
        "telling 1234567 people",
        "",
    ],
)
def test_what_is_no_personal_data_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    "piece",
    [
        "1", "1 ", "1111 ", "4111-", "00", "01 ", "+1", "+1 ", "(", "(12) ", "555-123-", "1.", "a@", "b@b.", "a.", "a'",
        "%40", "a%40", "用", '"', "phone ", " -", "[", '{"a":', "\\", ".", "'", ".'", "'a", "@", "@a.", ".@", "a用",
        '"@', "+", "0", "+(", "-", "/", "()", " ", "\u00a0", "\u200b1", "1\u2011", "01.02.", "2024-", "1:", "[1,", "\n",
    ],
)  # fmt: skip
def test_a_long_text_is_read_in_one_go(piece: str) -> None:
    """What looks at a text anew from each of its characters would take minutes."""
    started = time.monotonic()
    redacted(piece * (100_000 // len(piece)))
    assert time.monotonic() - started < 20


def test_long_names_and_names_that_become_equal_are_read_in_one_go() -> None:
    count = 10_000
    taken = {f"[email] {number}": 0 for number in range(count + 1, 2 * count)}
    arguments = {"!" * 50_000 + "x": [1] * count} | taken | {f"a{number}@example.org": 0 for number in range(count)}
    started = time.monotonic()
    (message,) = redact_personal_data([HumanMessage("hi", additional_kwargs={"input": arguments})])
    assert time.monotonic() - started < 20
    assert len(message.additional_kwargs["input"]) == len(arguments)


texts = st.lists(
    st.sampled_from(
        ["4111", "1111", "1", "49", "030", "0", "555", "1234567", "123456", "2024", "15", "a", "jane", "example", "org"]
        + ["@", ".", " ", "-", "+", "(", ")", "/", ":", "'", '"', "%40", "phone", "用", "\n", "[", "]", "{", "}", ","]
    ),
    max_size=14,
).map("".join)


@given(texts | st.text())
@example("03041114111+41114111")
def test_what_was_redacted_is_left_as_it_is(text: str) -> None:
    once = redacted(text)
    assert redacted(once) == once


@given(st.text(alphabet=st.characters(exclude_categories=["Nd", "Cs"], exclude_characters="@＠%")))
def test_a_text_without_digits_and_addresses_stays(text: str) -> None:
    assert redacted(text) == text


@given(
    st.from_regex(r"[A-Za-z][A-Za-z0-9]{0,9}([._+-][A-Za-z0-9]{1,9}){0,3}", fullmatch=True),
    st.from_regex(r"([A-Za-z][A-Za-z0-9-]{0,9}\.){1,3}[a-z]{2,9}", fullmatch=True),
)
def test_every_plain_address_is_found(local: str, domain: str) -> None:
    assert redacted(f"write to {local}@{domain}, please") == "write to [email], please"


@given(st.from_regex(r"[2-6][0-9]{11,17}", fullmatch=True), st.sampled_from(["", " ", "-", "\u00a0"]))
def test_every_card_number_is_found(body: str, gap: str) -> None:
    # The digit that makes the sum right, by the rule as the standard words it.
    total = 0
    for place, digit in enumerate(reversed(body)):
        double = int(digit) * 2 if place % 2 == 0 else int(digit)
        total += double - 9 if double > 9 else double
    number = body + str(-total % 10)
    grouped = gap.join(number[start : start + 4] for start in range(0, len(number), 4))
    assert redacted(f"no. {grouped}, thanks") == "no. [card], thanks"
    wrong = body + str((-total + 1) % 10)
    if body[:2] != "20":
        assert "[card]" not in redacted(f"no. {wrong}, thanks")


# --- What is found in a message --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Customer:
    mail: str
    phone: int


TURN: list[BaseMessage] = [
    HumanMessage(
        [
            f"a text: {MAIL}",
            {"type": "text", "text": f"a block: {PHONE}", "id": "block-1"},
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa+493012345678"}},
            {"type": "image", "source": {"type": "base64", "data": "aaaa/+493012345678"}},
            {"type": "image_url", "image_url": "https://example.org/4111111111111111.png"},
        ],
        name=MAIL,
        id="4111111111111111",
        note=MAIL,
    ),
    AIMessage(
        [
            {"type": "thinking", "thinking": f"it is {MAIL}", "signature": "aaaa/+493012345678"},
            {"type": "tool_use", "id": "4111111111111111", "name": "find", "input": {"id": MAIL}},
        ],
        tool_calls=[
            {
                "name": "find",
                "id": "4111111111111111",
                "args": {
                    "id": MAIL,
                    "url": f"mailto:{MAIL}",
                    "deep": [{"to": [f"<{MAIL}>"]}],
                    "phone": 5551234567,
                    "homePhone": "555 1234567",
                    "card": 4111111111111111,
                    "order": 5551234567,
                    "amount": 12.5,
                    "sure": True,
                    MAIL: 1,
                    f"{PHONE}": 2,
                    "+49 30 7654321": 3,
                },
            }
        ],
        invalid_tool_calls=[{"name": "find", "id": "+493012345678", "args": f"{{oops {MAIL}", "error": f"at {MAIL}"}],
        additional_kwargs={
            "function_call": {"name": "find", "arguments": '{"phone": 5551234567, "mail": "jane\\u0040example.org"}'},
            "tool_calls": [
                {"id": "4111111111111111", "function": {"name": "find", "arguments": f'{{"card": "{CARD}"}}'}}
            ],
            "user": {"id": MAIL},
        },
        response_metadata={"created": 1700000000, "echo": MAIL},
    ),
    ToolMessage(
        json.dumps({"phone": 5551234567, "mail": MAIL}),
        tool_call_id="4111111111111111",
        artifact=[Document(f"of {MAIL}", metadata={"by": PHONE}), Customer(MAIL, 5551234567), (CARD, b"raw"), {MAIL}],
    ),
    FunctionMessage(name="find", content=f"{MAIL} has {CARD}"),
]
SECRETS = ("jane", "1234567", "7654321", "1111 1111")


def test_every_place_of_a_message_is_looked_at_and_the_input_stays_as_it_was() -> None:
    before = copy.deepcopy(TURN)
    human, ai, result, function = redact_personal_data(TURN)
    assert TURN == before
    assert isinstance(ai, AIMessage) and isinstance(result, ToolMessage)
    assert human.content == [
        "a text: [email]",
        {"type": "text", "text": "a block: [phone]", "id": "block-1"},
        *TURN[0].content[2:],
    ]
    assert (human.name, human.note, human.id) == ("[email]", "[email]", "4111111111111111")  # type: ignore[attr-defined]
    assert ai.content == [
        {"type": "thinking", "thinking": "it is [email]", "signature": "aaaa/+493012345678"},
        {"type": "tool_use", "id": "4111111111111111", "name": "find", "input": {"id": "[email]"}},
    ]
    assert ai.tool_calls[0]["args"] == {
        "id": "[email]",
        "url": "mailto:[email]",
        "deep": [{"to": ["<[email]>"]}],
        "phone": "[phone]",
        "homePhone": "[phone]",
        "card": "[card]",
        "order": 5551234567,
        "amount": 12.5,
        "sure": True,
        "[email]": 1,
        "[phone]": 2,
        "[phone] 12": 3,
    }
    assert ai.invalid_tool_calls[0]["args"] == "{oops [email]"
    assert ai.invalid_tool_calls[0]["error"] == "at [email]"
    assert json.loads(ai.additional_kwargs["function_call"]["arguments"]) == {"phone": "[phone]", "mail": "[email]"}
    assert json.loads(ai.additional_kwargs["tool_calls"][0]["function"]["arguments"]) == {"card": "[card]"}
    assert ai.additional_kwargs["user"] == {"id": "[email]"}
    assert ai.response_metadata == {"created": 1700000000, "echo": "[email]"}
    assert json.loads(str(result.content)) == {"phone": "[phone]", "mail": "[email]"}
    document, customer, pair, few = result.artifact
    assert document == Document("of [email]", metadata={"by": "[phone]"})
    assert customer == Customer("[email]", "[phone]")  # type: ignore[arg-type]
    assert (pair, few) == (["[card]", b"raw"], ["[email]"])
    assert function.content == "[email] has [card]"


class Name(Enum):
    MAIL = MAIL
    NUMBER = 4111111111111111
    INNER = Decimal("4111111111111111")
    PHONE = "phone"


class Open(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)
    contact: Any


VALUES: list[tuple[Any, Any]] = [
    (Decimal("4111111111111111"), "[card]"),
    (4111111111111111.0, "[card]"),
    (Name.MAIL, "[email]"),
    (Name.NUMBER, "[card]"),
    (Name.INNER, "[card]"),
    ({Name.MAIL: 1, Decimal("5555555555554444"): 2, 4111111111111111.0: 3}, {"[email]": 1, "[card]": 2, "[card] 3": 3}),
    ({Name.PHONE: 5551234567.0, "deep": (Name.MAIL, {MAIL})}, {"phone": "[phone]", "deep": ["[email]", ["[email]"]]}),
    (Open(contact=Name.MAIL, **{MAIL: [Decimal("4111111111111111")]}), {"contact": "[email]", "[email]": ["[card]"]}),
    (Customer(Name.MAIL, 5551234567.0), {"mail": "[email]", "phone": "[phone]"}),  # type: ignore[arg-type]
    (
        [Decimal("5.50"), 5.5, float("nan"), float("inf"), 1e300, date(2024, 1, 15), b"jane", {1: None, None: 2.0}],
        ["5.50", 5.5, "NaN", "Infinity", 1e300, "2024-01-15", "amFuZQ==", {"1": None, "null": 2.0}],
    ),
    ({b"jane@example.org": 1}, {"amFuZUBleGFtcGxlLm9yZw==": 1}),
]


@pytest.mark.parametrize(("value", "expected"), VALUES)
def test_values_that_are_no_text_are_redacted_as_they_are_stored(value: Any, expected: Any) -> None:
    before = copy.deepcopy(value)
    call: Any = {"name": "find", "args": {"it": value}, "id": "1", "type": "tool_call"}
    said = [
        AIMessage([{"type": "x", "it": value}], tool_calls=[call], additional_kwargs={"it": value}, it=value),
        ToolMessage("", tool_call_id="1", artifact=value),
    ]
    ai, result = [to_message(to_stored(message)) for message in redact_personal_data(said)]
    assert isinstance(ai, AIMessage) and isinstance(result, ToolMessage)
    assert ai.content == [{"type": "x", "it": expected}]
    assert ai.tool_calls[0]["args"] == ai.additional_kwargs == {"it": expected}
    assert ai.it == result.artifact == expected  # type: ignore[attr-defined]
    assert repr(value) == repr(before)


def test_keys_of_blocks_and_names_of_extra_fields_are_redacted() -> None:
    message = HumanMessage([{"type": "text", "text": "hi", MAIL: 1, "more": {"+49 30 1234567": 2}}], **{MAIL: 3})
    (rewritten,) = redact_personal_data([message])
    assert rewritten.content == [{"type": "text", "text": "hi", "[email]": 1, "more": {"[phone]": 2}}]
    assert rewritten.model_extra is not None and rewritten.model_extra["[email]"] == 3
    assert shows_nothing(repr(to_stored(rewritten))) and message.model_extra is not None and MAIL in message.model_extra


def test_calls_and_results_still_match() -> None:
    assert [bonds_of(message) for message in redact_personal_data(TURN)] == [bonds_of(message) for message in TURN]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{ "a":  1.10 }', '{ "a":  1.10 }'),  # what holds nothing keeps its spacing
        (f'{{"a": "{MAIL}", "a": 1}}', '{"a": "[email]", "a": 1}'),
        (f"[1] {MAIL}", "[1] [email]"),
        (f'["{MAIL}", 4111111111111111, "ü"]', '["[email]", "[card]", "ü"]'),
        (f'{{"a": "{{\\"b\\": \\"{MAIL}\\"}}"}}', '{"a": "{\\"b\\": \\"[email]\\"}"}'),
    ],
)
def test_text_that_is_json_stays_json(text: str, expected: str) -> None:
    assert redacted(text) == expected


# --- A store that redacts --------------------------------------------------------------------------------------------


class Redact:
    """The ready function, which notes what it was given."""

    def __init__(self) -> None:
        self.given: list[list[str]] = []

    def __call__(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        self.given.append([str(message.content) for message in messages])
        return redact_personal_data(messages)


@pytest.fixture
def redact() -> Redact:
    return Redact()


@pytest.fixture
def redacting(server_dsn: str, store: ConversationStore, redact: Redact) -> Iterator[ConversationStore]:
    """A store that redacts, over the schema of `store`."""
    with ConversationStore(server_dsn, schema=store.schema, redact=redact) as other:
        yield other


QUESTION, ANSWER = f"I am {MAIL}", f"call {PHONE}"
MEMORIES: dict[str, Callable[..., PostgresChatMemory]] = {
    "buffer": BufferMemory,
    "token window": TokenWindowMemory,
    "relevant turns": lambda **fields: RelevantTurnMemory(keywords=["[email]"], **fields),
    "summary": lambda **fields: SummaryMemory(llm=scripted("a summary"), **fields),
}
each_memory = pytest.mark.parametrize("make", MEMORIES.values(), ids=MEMORIES)
both_ways = pytest.mark.parametrize("asynchronous", [False, True])


def save(memory: PostgresChatMemory, asynchronous: bool = False) -> None:
    said: tuple[Any, Any] = ({"input": QUESTION}, {"output": ANSWER})
    if asynchronous:
        asyncio.run(memory.asave_context(*said))
    else:
        memory.save_context(*said)


def contents(store: ConversationStore, session_id: str = "s") -> list[str]:
    return [message.content for message in store.list_messages(session_id)]


@both_ways
@each_memory
def test_every_memory_stores_a_turn_redacted_once(
    redacting: ConversationStore, redact: Redact, make: Callable[..., PostgresChatMemory], asynchronous: bool
) -> None:
    memory = make(session_id="s", store=redacting)
    save(memory, asynchronous)
    assert contents(redacting) == ["I am [email]", "call [phone]"]
    assert redact.given == [[QUESTION, ANSWER]]
    assert [message.content for message in memory.buffer_as_messages] == ["I am [email]", "call [phone]"]


@both_ways
@each_memory
def test_a_memory_as_a_history_stores_a_turn_redacted_once(
    redacting: ConversationStore, redact: Redact, make: Callable[..., PostgresChatMemory], asynchronous: bool
) -> None:
    history = make(session_id="s", store=redacting).as_history()
    turn = [HumanMessage(QUESTION), AIMessage(ANSWER)]
    if asynchronous:
        asyncio.run(history.aadd_messages(turn))
    else:
        history.add_messages(turn)
    history.add_message(AIMessage(CARD))
    assert contents(redacting)[:2] == ["I am [email]", "call [phone]"]
    assert redact.given == [[QUESTION, ANSWER], [CARD]]
    assert CARD not in contents(redacting)


@both_ways
def test_a_history_stores_messages_redacted_once(
    redacting: ConversationStore, redact: Redact, asynchronous: bool
) -> None:
    history = PostgresChatMessageHistory("s", redacting)
    if asynchronous:
        asyncio.run(history.aadd_messages(TURN))
    else:
        history.add_messages(TURN)
    assert len(redact.given) == 1
    assert history.messages[1].tool_calls[0]["args"]["deep"] == [{"to": ["<[email]>"]}]  # type: ignore[attr-defined]
    rows = repr(redacting.list_messages("s")).replace("aaaa/+493012345678", "").replace("aaaa+493012345678", "")
    rows = rows.replace('"+493012345678"', "")  # pictures, signatures and ids stay
    assert not [secret for secret in SECRETS if secret in rows.replace("5551234567", "")]
    history.add_messages([])
    assert len(redact.given) == 1


def test_a_message_or_turn_that_takes_another_s_place_is_redacted(redacting: ConversationStore) -> None:
    history = PostgresChatMessageHistory("s", redacting)
    history.add_messages([HumanMessage("a"), AIMessage("b"), HumanMessage("c"), AIMessage("d")])
    history.replace_message(0, QUESTION)
    history.replace_message(1, AIMessage(ANSWER))
    history.replace_turn(2, [HumanMessage(MAIL), AIMessage(CARD)])
    assert contents(redacting) == ["I am [email]", "call [phone]", "[email]", "[card]"]


@pytest.mark.filterwarnings("ignore:The class `ConversationChain` was deprecated")
@both_ways
def test_the_model_sees_what_is_said_now_and_what_was_stored_later(
    redacting: ConversationStore, asynchronous: bool
) -> None:
    llm = scripted(ANSWER, "yes")
    chain: Any = ConversationChain(llm=llm, memory=BufferMemory(session_id="s", store=redacting))

    def ask(text: str) -> str:
        answer = asyncio.run(chain.ainvoke({"input": text})) if asynchronous else chain.invoke({"input": text})
        return str(answer["response"])

    assert ask(QUESTION) == ANSWER
    assert ask("again?") == "yes"
    assert MAIL in llm.prompts[0]
    assert "I am [email]" in llm.prompts[1] and MAIL not in llm.prompts[1] and PHONE not in llm.prompts[1]


@both_ways
def test_an_agent_s_steps_are_redacted_with_its_turn(
    redacting: ConversationStore, redact: Redact, asynchronous: bool
) -> None:
    seen = []

    @tool
    def find(mail: str) -> dict[str, Any]:
        """Find a customer."""
        seen.append(mail)
        return {"mail": mail, "phone": 5551234567}

    tools = [find]
    call = {"name": "find", "args": {"mail": MAIL}, "id": "call_1", "type": "tool_call"}
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("history"), ("human", "{input}"), MessagesPlaceholder("agent_scratchpad")]
    )
    memory = BufferMemory(session_id="s", store=redacting, return_messages=True, save_intermediate_steps=True)
    executor = AgentExecutor(
        agent=create_tool_calling_agent(scripted(AIMessage("", tool_calls=[call]), ANSWER), tools, prompt),
        tools=tools,
        memory=memory,
        return_intermediate_steps=True,
    )
    said: dict[str, Any] = {"input": QUESTION}
    answer = asyncio.run(executor.ainvoke(said)) if asynchronous else executor.invoke(said)
    assert (answer["output"], seen) == (ANSWER, [MAIL])
    human, calling, result, ai = memory.buffer_as_messages
    assert human.content == "I am [email]" and ai.content == "call [phone]"
    assert isinstance(calling, AIMessage) and calling.tool_calls[0]["args"] == {"mail": "[email]"}
    assert isinstance(result, ToolMessage) and result.tool_call_id == calling.tool_calls[0]["id"] == "call_1"
    assert json.loads(str(result.content)) == {"mail": "[email]", "phone": "[phone]"}
    assert len(redact.given) == 1


def runnable(store: ConversationStore, *answers: str) -> Any:
    return RunnableWithMessageHistory(
        ChatPromptTemplate.from_messages([("placeholder", "{history}"), ("human", "{input}")]) | scripted(*answers),
        lambda session_id: PostgresChatMessageHistory(session_id, store),
        input_messages_key="input",
        history_messages_key="history",
    )


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")
@both_ways
def test_a_runnable_s_turn_is_redacted(redacting: ConversationStore, redact: Redact, asynchronous: bool) -> None:
    config: Any = {"configurable": {"session_id": "s"}}
    wrapped, said = runnable(redacting, ANSWER), {"input": QUESTION}
    answer = asyncio.run(wrapped.ainvoke(said, config)) if asynchronous else wrapped.invoke(said, config)
    assert answer.content == ANSWER
    assert contents(redacting) == ["I am [email]", "call [phone]"]
    assert redact.given == [[QUESTION, ANSWER]]


def test_relevance_is_judged_by_what_is_stored(redacting: ConversationStore) -> None:
    judged: list[list[Any]] = []

    def is_relevant(messages: Sequence[BaseMessage]) -> bool:
        judged.append([message.content for message in messages])
        return True

    save(RelevantTurnMemory(session_id="s", store=redacting, keywords=["jane"], is_relevant=is_relevant))
    save(RelevantTurnMemory(session_id="t", store=redacting, keywords=["jane"]))
    assert judged == [["I am [email]", "call [phone]"]]
    assert contents(redacting, "t") == []


@each_memory
def test_an_empty_list_stores_nothing(
    server_dsn: str, store: ConversationStore, make: Callable[..., PostgresChatMemory]
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, redact=lambda messages: []) as silent:
        memory = make(session_id="s", store=silent)
        save(memory)
        memory.chat_memory.add_messages([HumanMessage("hi")])
    assert store.get_conversation("s") is None


# --- When something fails --------------------------------------------------------------------------------------------


def shows_nothing(*texts: str) -> bool:
    return not any(secret in text for text in texts for secret in (MAIL, PHONE, "jane", "1234567"))


@both_ways
@each_memory
def test_an_unsaved_turn_is_the_redacted_one(
    caplog: pytest.LogCaptureFixture, make: Callable[..., PostgresChatMemory], asynchronous: bool
) -> None:
    with ConversationStore("postgresql://127.0.0.1:1/db", retry_seconds=0, redact=redact_personal_data) as nowhere:
        make_memory = functools.partial(make, session_id="s", store=nowhere)
        with pytest.raises(StoreUnavailableError) as caught:
            save(make_memory(), asynchronous)
        save(make_memory(on_save_error="log"), asynchronous)
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    for turn in (caught.value.unsaved_turn, record.unsaved_turn):  # type: ignore[attr-defined]
        assert [message.content for message in turn.messages] == ["I am [email]", "call [phone]"]
    assert shows_nothing(caplog.text, str(caught.value))


def looped() -> dict[str, Any]:
    loop: dict[str, Any] = {}
    loop["jane"] = loop
    return loop


def fails(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    raise RuntimeError(f"cannot read {messages[0].content}")


def fails_late(messages: Sequence[BaseMessage]) -> Iterator[BaseMessage]:
    yield messages[0]
    raise RuntimeError(f"cannot read {messages[1].content}")


FAULTS: dict[str, tuple[Any, str]] = {
    "fails": (fails, r"redact failed: RuntimeError at .*test_redaction\.py:\d+$"),
    "fails late": (fails_late, r"redact failed: RuntimeError at .*test_redaction\.py:\d+$"),
    "nothing": (lambda messages: None, "redact failed: TypeError"),
    "text": (lambda messages: QUESTION, "redact must return messages, not a str"),
    "texts": (lambda messages: [message.content for message in messages], "redact must return messages, not a str"),
    "one message": (lambda messages: messages[0], "redact must return messages, not a tuple"),
}


@pytest.mark.parametrize(("redact", "text"), FAULTS.values(), ids=FAULTS)
@each_memory
def test_nothing_is_kept_of_a_turn_that_could_not_be_redacted(
    server_dsn: str,
    store: ConversationStore,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., PostgresChatMemory],
    redact: Any,
    text: str,
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, redact=redact) as other:
        memory = make(session_id="s", store=other)
        with pytest.raises(MessageNotStorableError, match=text) as caught:
            save(memory)
        assert caught.value.unsaved_turn is None and shows_nothing(str(caught.value), repr(caught.value))
        assert caplog.records == []
        save(make(session_id="s", store=other, on_save_error="log"))
        with pytest.raises(MessageNotStorableError, match=text):
            memory.chat_memory.add_messages([HumanMessage(QUESTION), AIMessage(ANSWER)])
        with pytest.raises(MessageNotStorableError, match=text):
            memory.as_history().add_messages([HumanMessage(QUESTION), AIMessage(ANSWER)])
    assert len(caplog.records) == 3
    for record in caplog.records:
        assert record.unsaved_turn is None and "'s'" in record.getMessage()  # type: ignore[attr-defined]
    assert shows_nothing(caplog.text, repr([vars(record) for record in caplog.records]))
    assert contents(store) == []


@pytest.mark.filterwarnings("ignore:RunnableWithMessageHistory is deprecated")
def test_a_runnable_s_turn_that_could_not_be_redacted_is_told_of_without_its_text(
    server_dsn: str, store: ConversationStore, caplog: pytest.LogCaptureFixture
) -> None:
    with ConversationStore(server_dsn, schema=store.schema, redact=fails) as other:
        answer = runnable(other, ANSWER).invoke({"input": QUESTION}, {"configurable": {"session_id": "s"}})
    assert answer.content == ANSWER and contents(store) == []
    assert "redact failed" in caplog.text and shows_nothing(caplog.text)


@both_ways
@each_memory
def test_a_traceback_shows_nothing_of_a_turn_that_could_not_be_redacted(
    server_dsn: str, make: Callable[..., PostgresChatMemory], asynchronous: bool
) -> None:
    with ConversationStore(server_dsn, redact=fails) as store, pytest.raises(MessageNotStorableError) as caught:
        save(make(session_id="s", store=store), asynchronous)
    assert caught.value.__cause__ is caught.value.__context__ is None
    assert shows_nothing("".join(traceback.format_exception(caught.value)))


UNSTORABLE: dict[str, tuple[Any, Any, str]] = {
    "input": ({MAIL: object()}, ANSWER, r"inputs['input'][…]: an object of type object has no JSON form"),
    "output": (QUESTION, [{MAIL: {1, object()}}], "outputs['output'][…]: an object of type object has no JSON form"),
    "equal keys": ({MAIL: {Name.MAIL: 1, MAIL: 2}}, ANSWER, "inputs['input'][…]: another key of the same dict also"),
    "whole": (object(), ANSWER, "inputs['input']: an object of type object has no JSON form"),
    "block": ([{"type": "text", "text": QUESTION, MAIL: object()}], ANSWER, "messages[0].content[0]['[email]']: an"),
    "field": (QUESTION, AIMessage(ANSWER, **{MAIL: object()}), "messages[1].[email]: an object of type object has"),
    "key": (QUESTION, AIMessage(ANSWER, additional_kwargs={"a": {(MAIL,): 1}}), "messages: redact failed: TypeError"),
    "loop": (QUESTION, AIMessage(ANSWER, additional_kwargs={MAIL: looped()}), "messages: redact failed: RecursionErr"),
}


@pytest.mark.parametrize(("said", "answered", "text"), UNSTORABLE.values(), ids=UNSTORABLE)
@both_ways
@pytest.mark.parametrize("make", [MEMORIES["buffer"], MEMORIES["summary"]], ids=["buffer", "summary"])
def test_what_cannot_be_stored_is_told_of_without_what_would_have_been_redacted(
    redacting: ConversationStore,
    caplog: pytest.LogCaptureFixture,
    make: Callable[..., PostgresChatMemory],
    asynchronous: bool,
    said: Any,
    answered: Any,
    text: str,
) -> None:
    def save_it(memory: PostgresChatMemory) -> None:
        turn: tuple[Any, Any] = ({"input": said}, {"output": answered})
        if asynchronous:
            asyncio.run(memory.asave_context(*turn))
        else:
            memory.save_context(*turn)

    with pytest.raises(MessageNotStorableError, match=re.escape(f"cannot store {text}")) as caught:
        save_it(make(session_id="s", store=redacting))
    assert caught.value.unsaved_turn is None
    assert shows_nothing(repr(caught.value), "".join(traceback.format_exception(caught.value)))
    save_it(make(session_id="s", store=redacting, on_save_error="log"))
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.unsaved_turn is None and text in record.getMessage()  # type: ignore[attr-defined]
    assert shows_nothing(caplog.text) and contents(redacting) == []


def test_a_store_that_does_not_redact_names_keys(store: ConversationStore) -> None:
    with pytest.raises(MessageNotStorableError, match=r"cannot store inputs\['input'\]\['to'\]: an object"):
        BufferMemory(session_id="s", store=store).save_context({"input": {"to": object()}}, {"output": "hi"})


async def later(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    return list(messages)


class Later:
    async def __call__(self, messages: Sequence[BaseMessage]) -> list[BaseMessage]:
        return list(messages)


@pytest.mark.parametrize(
    ("redact", "text"),
    [
        (later, "a coroutine is not awaited"),
        (functools.partial(later), "a coroutine is not awaited"),
        (Later(), "a coroutine is not awaited"),
        (True, "redact must be a function or None, not a bool"),
        ("redact_personal_data", "redact must be a function or None, not a str"),
    ],
)
def test_what_cannot_redact_is_refused(redact: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        ConversationStore("postgresql://127.0.0.1:1/db", redact=redact)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda store: pickle.loads(pickle.dumps(store))])
def test_a_copy_of_a_store_redacts_too(
    server_dsn: str, store: ConversationStore, duplicate: Callable[[ConversationStore], ConversationStore]
) -> None:
    original = ConversationStore(server_dsn, schema=store.schema, redact=redact_personal_data)
    with original, duplicate(original) as copied:
        save(BufferMemory(session_id="s", store=copied))
    assert contents(store) == ["I am [email]", "call [phone]"]

"""The audit behind a campaign of random faults can fail: it counts each kind of harm."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from chaos.audit import Findings, Turn, audit, examine, read_log, table, turn_texts
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

from pgmemory import ConversationStore

SESSION = "conversation"
_CONVERSATION = """
insert into {schema}.conversations (id, tenant_id, user_id, session_id, next_message_index)
values (gen_random_uuid(), '', '', %s, %s) returning id
"""
_MESSAGE = """
insert into {schema}.conversation_messages (conversation_id, message_index, tenant_id, role, content, created_at)
values (%s, %s, '', 'human', %s, clock_timestamp())
"""


def texts(writer: str, number: int, parts: int = 2) -> list[str]:
    return turn_texts(Turn(writer, number), parts)


W1, W2, W3 = (texts("w1", number) for number in (1, 2, 3))
TOOLS = texts("w2", 1, parts=5)
LOG = [*W1, *TOOLS, *W2, *W3]
ACKNOWLEDGED = [Turn("w1", 1), Turn("w1", 2), Turn("w1", 3), Turn("w2", 1)]


def write(admin: Connection, schema: str, log: Sequence[tuple[int, str]], session_id: str = SESSION) -> None:
    """Store messages with these numbers, as nothing but SQL can."""
    with admin.cursor() as cursor:
        named = {"schema": sql.Identifier(schema)}
        cursor.execute(sql.SQL(_CONVERSATION).format(**named), [session_id, len(log)])
        ((conversation_id,),) = cursor.fetchall()
        for index, content in log:
            cursor.execute(sql.SQL(_MESSAGE).format(**named), [conversation_id, index, content])


@pytest.mark.parametrize(
    ("log", "counts"),
    [
        (LOG, (0, 0, 0, 0)),
        ([*W1, *TOOLS, *W3], (1, 0, 0, 0)),
        ([*W1, *W2, *W3], (1, 0, 0, 0)),
        ([*LOG, *W3], (0, 1, 0, 0)),
        ([*W1, *TOOLS, *TOOLS, *TOOLS, *W2, *W3], (0, 1, 0, 0)),
        ([*W1, *TOOLS, W2[0], *W3], (0, 0, 1, 0)),
        ([*W1, *TOOLS, W2[1], *W3], (0, 0, 1, 0)),
        ([*W1, *TOOLS[:2], *TOOLS[3:], *W2, *W3], (0, 0, 1, 0)),
        ([W1[0], TOOLS[0], W1[1], *TOOLS[1:], *W2, *W3], (0, 0, 2, 0)),
        ([*W1, *TOOLS[:2], *W2, *TOOLS[2:], *W3], (0, 0, 1, 0)),
        ([*reversed(W1), *TOOLS, *W2, *W3], (0, 0, 1, 0)),
        ([*W1, W1[1], *TOOLS, *W2, *W3], (0, 0, 1, 0)),
        ([*LOG, "somebody else's text"], (0, 0, 1, 0)),
        ([*W1, *W3, *W2, *TOOLS], (0, 0, 0, 1)),
        ([*W3, *W1, *W2, *TOOLS], (0, 0, 0, 2)),
        ([], (4, 0, 0, 0)),
    ],
    ids=[
        "right",
        "lost",
        "lost with tools",
        "doubled",
        "there three times",
        "without its answer",
        "without its question",
        "without a tool's result",
        "interleaved",
        "a turn in another",
        "turned round",
        "a message twice",
        "foreign",
        "one behind a later one",
        "two behind a later one",
        "nothing there",
    ],
)
def test_the_audit_counts_each_kind_of_harm(
    store: ConversationStore,
    admin: Connection,
    schema_name: str,
    log: list[str],
    counts: tuple[int, int, int, int],
) -> None:
    write(admin, schema_name, list(enumerate(log)))
    findings, unsure = audit(read_log(admin, schema_name), [(SESSION, turn) for turn in ACKNOWLEDGED])
    assert tuple(findings.counts().values()) == counts, findings
    assert unsure == (1 if "somebody else's text" in log else 0)


@pytest.mark.parametrize(
    "numbers", [[0, 1, 3, 4], [1, 2, 3, 4], [0, 1, 2, 4]], ids=["gap", "not from 0", "gap in a turn"]
)
def test_the_audit_counts_a_gap_in_the_numbers_as_misordered(
    store: ConversationStore, admin: Connection, schema_name: str, numbers: list[int]
) -> None:
    write(admin, schema_name, list(zip(numbers, [*W1, *W2], strict=True)))
    findings, _ = audit(read_log(admin, schema_name), [])
    assert tuple(findings.counts().values()) == (0, 0, 0, 1), findings


def test_the_audit_keeps_conversations_apart(store: ConversationStore, admin: Connection, schema_name: str) -> None:
    """A turn in another conversation than its own is lost; a later turn elsewhere is none behind it."""
    write(admin, schema_name, list(enumerate([*W2, *W3])), "one")
    write(admin, schema_name, list(enumerate([*W1, *W3])), "two")
    acknowledged = [("one", Turn("w1", 2)), ("one", Turn("w1", 1)), ("two", Turn("w1", 3))]
    findings, unsure = audit(read_log(admin, schema_name), acknowledged)
    assert findings == Findings(lost=["one: w1 000001"])
    assert unsure == 2


def test_the_audit_reads_what_the_memories_write(store: ConversationStore, admin: Connection, schema_name: str) -> None:
    from pgmemory import BufferMemory

    memory = BufferMemory(session_id=SESSION, store=store, return_messages=True)
    memory.save_context({"input": W1[0]}, {"output": W1[1]})
    memory.save_context({"input": W1[0]}, {"output": W1[1]})
    expected = Findings(doubled=["w1 000001"])
    findings, there = examine([str(message.content) for message in memory.load_memory_variables({})["history"]])
    assert (findings, there) == (expected, {Turn("w1", 1)})
    findings, unsure = audit(read_log(admin, schema_name), [(SESSION, Turn("w1", 1))])
    assert findings == Findings(doubled=[f"{SESSION}: w1 000001"])
    assert unsure == 0


def test_a_window_that_begins_within_a_turn_is_cut() -> None:
    findings, _ = examine(LOG[1:])
    assert findings == Findings(cut=["w1 000001"])


def test_the_table_names_every_count() -> None:
    findings = Findings(lost=["a", "b"], cut=["c"])
    lines = table(7, 120.4, 10_000, 3, {"session killed": 4, "pool exhausted": 1}, findings).splitlines()
    rows = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]
    assert rows == [
        ("seed", "7"),
        ("seconds", "120"),
        ("turns acknowledged", "10,000"),
        ("turns of killed writers, stored but not acknowledged", "3"),
        ("faults", "5"),
        ("— session killed", "4"),
        ("— pool exhausted", "1"),
        ("**lost**", "**2**"),
        ("**doubled**", "**0**"),
        ("**cut**", "**1**"),
        ("**misordered**", "**0**"),
    ]

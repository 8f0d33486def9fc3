"""What a campaign left behind: what turns look like, how a log or a window is examined, and the table.

Owns: the text of turns, the four counts. Knows the tables, but nothing of pgmemory's code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from psycopg2 import sql
from psycopg2.extensions import connection as Connection

ROLES = {2: ("human", "ai"), 5: ("human", "call", "tool", "tool", "ai")}

_TEXT = re.compile(r"(\S+) (\d{6}) \w+ (\d)/(\d)")
_READ_LOG = """
select c.session_id, m.message_index, m.content
from {schema}.conversation_messages m join {schema}.conversations c on c.id = m.conversation_id
order by c.session_id, m.message_index
"""


class Turn(NamedTuple):
    """A turn's name: its writer and the writer's own number for it, which goes up over all conversations."""

    writer: str
    number: int

    def __str__(self) -> str:
        return f"{self.writer} {self.number:06}"


class _Piece(NamedTuple):
    turn: Turn
    part: int
    parts: int


class Row(NamedTuple):
    """A message as the audit reads it."""

    session_id: str
    message_index: int
    content: str


@dataclass
class Findings:
    """What was wrong, one line for each thing.

    Attributes:
        lost: Turns that were acknowledged and are absent.
        doubled: Turns that are there more than once.
        cut: Turns of which a part is missing or stands apart from the rest.
        misordered: Turns behind a later one of the same writer, and numbers of messages that do not follow the one
            before.
    """

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    misordered: list[str] = field(default_factory=list)

    def add(self, other: Findings, place: str) -> None:
        """Take over what was found in one place."""
        for name, lines in vars(other).items():
            getattr(self, name).extend(f"{place}: {line}" for line in lines)

    def counts(self) -> dict[str, int]:
        """Return how many of each kind."""
        return {name: len(lines) for name, lines in vars(self).items()}


class Audit(NamedTuple):
    """The findings, and how many turns are there that nobody had acknowledged: those of killed writers."""

    findings: Findings
    unsure: int


def turn_texts(turn: Turn, parts: int) -> list[str]:
    """Return the text of each of a turn's messages; it says to which turn it belongs and which part of it it is."""
    return [f"{turn} {role} {part}/{parts}" for part, role in enumerate(ROLES[parts], start=1)]


def examine(contents: Sequence[str]) -> tuple[Findings, set[Turn]]:
    """Look for turns that are doubled, cut or misordered among neighbouring messages, oldest first.

    Returns:
        What was found, and the turns that are there, whole or not.
    """
    pieces = [_piece(content) for content in contents]
    whole: Counter[Turn] = Counter()
    broken: set[Turn] = set()
    order: dict[Turn, None] = {}  # turns by their first message
    position = 0
    while position < len(pieces):
        turn, _, parts = pieces[position]
        order.setdefault(turn)
        if pieces[position : position + parts] == [_Piece(turn, part, parts) for part in range(1, parts + 1)]:
            whole[turn] += 1
            position += parts
        else:
            broken.add(turn)
            position += 1
    findings = Findings(
        doubled=[str(turn) for turn, times in whole.items() if times > 1], cut=[str(turn) for turn in sorted(broken)]
    )
    latest: dict[str, int] = {}
    for turn in order:
        if turn.number < latest.get(turn.writer, 0):
            findings.misordered.append(f"{turn} after {latest[turn.writer]:06}")
        latest[turn.writer] = max(turn.number, latest.get(turn.writer, 0))
    return findings, set(order)


def read_log(connection: Connection, schema: str) -> list[Row]:
    """Return every message of a schema, by plain SQL."""
    with connection.cursor() as cursor:
        cursor.execute(sql.SQL(_READ_LOG).format(schema=sql.Identifier(schema)))
        return [Row(*row) for row in cursor.fetchall()]


def audit(rows: Iterable[Row], acknowledged: Iterable[tuple[str, Turn]]) -> Audit:
    """Compare what is there, sorted as `read_log` sorts it, with the turns of conversations that were acknowledged."""
    findings = Findings()
    there: set[tuple[str, Turn]] = set()
    for session_id, group in groupby(rows, key=lambda row: row.session_id):
        log = list(group)
        found, turns = examine([row.content for row in log])
        before = -1
        for row in log:
            if row.message_index != before + 1:
                found.misordered.append(f"message {row.message_index} after {before}")
            before = row.message_index
        findings.add(found, session_id)
        there.update((session_id, turn) for turn in turns)
    wanted = set(acknowledged)
    findings.lost += [f"{session_id}: {turn}" for session_id, turn in sorted(wanted - there)]
    return Audit(findings, len(there - wanted))


def table(seed: int, seconds: float, turns: int, unsure: int, faults: Mapping[str, int], findings: Findings) -> str:
    """Return a campaign's outcome as a Markdown table."""
    lines: list[tuple[str, object]] = [
        ("seed", seed),
        ("seconds", round(seconds)),
        ("turns acknowledged", f"{turns:,}"),
        ("turns of killed writers, stored but not acknowledged", unsure),
        ("faults", sum(faults.values())),
        *((f"— {kind}", times) for kind, times in faults.items()),
        *((f"**{kind}**", f"**{times}**") for kind, times in findings.counts().items()),
    ]
    return "\n".join(["| campaign | |", "|---|---:|", *(f"| {name} | {value} |" for name, value in lines)])


def _piece(content: str) -> _Piece:
    match = _TEXT.fullmatch(content)
    if match is None:
        return _Piece(Turn(f"nobody's text {content!r}", 0), 0, 1)  # no part 0 is ever whole
    writer, number, part, parts = match.groups()
    return _Piece(Turn(writer, int(number)), int(part), int(parts))

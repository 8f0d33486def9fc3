"""The example own_memories, run as a program."""

from __future__ import annotations

from psycopg2.extensions import connection as Connection
from test_examples import EXAMPLES, Run, after, answers, log, spoken
from test_examples import run as run  # a fixture


def test_own_memories_redacts_what_is_stored_and_filters_and_bounds_what_is_shown(
    run: Run, admin: Connection, schema_name: str
) -> None:
    output = run("own_memories")

    messages = spoken(admin, schema_name)
    assert after(output, "In the log") == messages
    assert len(messages) == 8
    assert not any("example.org" in row.content for row in log(admin, schema_name))
    assert "[e-mail]" in messages[0] and "weather" in messages[2]
    # The bot knows what is left of the first turn, and not of the weather.
    assert answers(output)[-1].startswith("You told me: My kettle leaks. Write to [e-mail]")
    short, long = (after(output, f"Shown to the model with a {name} question") for name in ("short", "long"))
    assert short == messages[:2] + messages[4:]
    assert long == messages[6:]


def test_own_memories_says_how_to_run_it() -> None:
    assert "    python examples/own_memories.py" in (EXAMPLES / "own_memories.py").read_text(encoding="utf-8")

"""The examples, each run as a program: what it prints and what is in the database afterwards."""

from __future__ import annotations

import importlib.util
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from conftest import PROJECT, RUN_FOLDER
from psycopg2 import sql
from psycopg2.extensions import connection as Connection

EXAMPLES = PROJECT / "examples"
SECRET_VARIABLES = ("OPENAI_API_KEY", "OPENAI_MODEL", "DATABASE_URL")
TIME_LIMIT_SECONDS = 120

Run = Callable[..., str]


@pytest.fixture
def run(server_dsn: str, schema_name: str) -> Run:
    """Run an example against the test's own schema and return what it printed.

    Fails the test if it prints anything at all on its error output, warnings among it, or does not end as expected.
    """

    def run(
        name: str, *arguments: str | Path, env: dict[str, str] | None = None, stdin: int = subprocess.DEVNULL
    ) -> str:
        env = {"DATABASE_URL": server_dsn, **(env or {})}
        result = start(name, "--schema", schema_name, *arguments, env=env, stdin=stdin)
        assert (result.returncode, result.stderr) == (0, ""), result.stdout
        return result.stdout

    return run


def start(
    name: str, *arguments: str | Path, env: dict[str, str], stdin: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    """Run an example with warnings as errors; no setting of the machine's reaches it but what `env` says."""
    inherited = {name: value for name, value in os.environ.items() if name not in SECRET_VARIABLES}
    path = os.pathsep.join([env.get("PYTHONPATH", ""), str(PROJECT)]).strip(os.pathsep)
    return subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", *arguments],
        # By the environment, not by -W, so that it holds for the processes that an example starts.
        env={**inherited, **env, "PYTHONPATH": path, "PYTHONWARNINGS": "error", "PYTHONIOENCODING": "utf-8"},
        stdin=stdin,
        capture_output=True,
        encoding="utf-8",
        timeout=TIME_LIMIT_SECONDS,
    )


class Row(NamedTuple):
    """A stored message."""

    session_id: str
    user_id: str
    role: str
    content: str
    tags: list[str] | None


def log(admin: Connection, schema_name: str) -> list[Row]:
    """Return all that is stored in a schema, conversation by conversation."""
    statement = """
        select session_id, user_id, role, content, tags
        from {0}.conversation_messages m join {0}.conversations c on c.id = m.conversation_id
        order by c.created_at, c.id, message_index
    """
    with admin.cursor() as cursor:
        cursor.execute(sql.SQL(statement).format(sql.Identifier(schema_name)))
        return [Row(*row) for row in cursor.fetchall()]


def spoken(admin: Connection, schema_name: str) -> list[str]:
    """Return the log's lines as the examples print messages."""
    who = {"human": "Human", "ai": "AI"}
    return [f"  {who[row.role]}: {one_line(row.content)}" for row in log(admin, schema_name)]


def after(text: str, heading: str) -> list[str]:
    """Return the lines between one that begins with a heading and the next one that is not indented."""
    lines = text.splitlines()
    first = next(position for position, line in enumerate(lines) if line.startswith(heading)) + 1
    last = first
    while last < len(lines) and lines[last].startswith(" "):
        last += 1
    return lines[first:last]


def answers(text: str) -> list[str]:
    """Return what the model said."""
    return [line.removeprefix("Bot: ") for line in text.splitlines() if line.startswith("Bot: ")]


def one_line(text: str) -> str:
    return " ".join(text.split())


NOTHING_FOUND = "I find nothing about that in my memory."


def test_every_example_says_how_to_run_it() -> None:
    names = {path.stem for path in EXAMPLES.glob("[!_]*.py")}
    assert names == {
        "agent_with_memory", "buffer_chat", "own_memories", "runnable_history", "summary_chat", "support_bot",
        "token_window_chat",
    }  # fmt: skip
    for name in names:
        assert f"    python examples/{name}.py" in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


def test_buffer_chat_goes_on_in_another_worker_with_the_last_two_turns(
    run: Run, admin: Connection, schema_name: str
) -> None:
    output = run("buffer_chat")

    assert "Model: a stand-in" in output
    # The second worker's first question is about the second turn; by the next one the first turn is out of the window.
    assert answers(output)[-2:] == ["You told me: My address is 12 Lime Street.", NOTHING_FOUND]
    messages = spoken(admin, schema_name)
    assert len(messages) == 10
    assert after(output, "The log keeps 10 messages") == messages[-4:]


def test_token_window_chat_shows_what_fell_out_of_the_window_and_is_still_in_the_log(
    run: Run, admin: Connection, schema_name: str
) -> None:
    output = run("token_window_chat")

    fallen, window = after(output, "Fell out of the window of 70 tokens"), after(output, "In the window")
    assert fallen and window
    assert fallen + window == spoken(admin, schema_name)
    assert window[0].startswith("  Human: ")
    with admin.cursor() as cursor:
        counts = sql.SQL("select token_count from {}.conversation_messages order by message_index")
        cursor.execute(counts.format(sql.Identifier(schema_name)))
        tokens = [count for (count,) in cursor.fetchall()]
    # 3 tokens go to the whole; one more turn would not have fitted.
    assert sum(tokens[-len(window) :]) + 3 <= 70 < sum(tokens[-len(window) - 2 :]) + 3
    # The kettle was in the first turn, which the model no longer sees.
    assert answers(output)[-1] == NOTHING_FOUND
    assert "a memory with a limit of 2000 tokens shows 10." in output


def test_summary_chat_folds_old_turns_into_a_summary_that_a_new_memory_begins_with(
    run: Run, admin: Connection, schema_name: str
) -> None:
    output = run("summary_chat")

    head, *turns = after(output, "The log keeps 12 messages")
    summary = head.removeprefix("  System: ")
    assert "I ordered a blue kettle." in summary
    with admin.cursor() as cursor:
        cursor.execute(
            sql.SQL("select content from {}.conversation_summaries").format(sql.Identifier(schema_name))
        )
        assert (summary,) in cursor.fetchall()
    # What the summary covers and the turns after it are the whole log, without a gap and without a repetition.
    messages = spoken(admin, schema_name)[:12]
    assert turns == messages[-len(turns) :]
    covered = [line.removeprefix("  Human: ") for line in messages[: -len(turns)] if line.startswith("  Human: ")]
    assert summary == " ".join(["The human said:", *covered])
    assert answers(output)[-1] == f"You told me: {summary}"


def test_agent_with_memory_knows_the_order_from_an_earlier_turn(run: Run, admin: Connection, schema_name: str) -> None:
    output = run("agent_with_memory")

    assert output.count("the tool order_status(7001) is called") == 2
    state = "Order 7001 was sent on Monday and arrives on Thursday."
    assert answers(output) == [state, state, "You are welcome."]
    messages = spoken(admin, schema_name)
    assert len(messages) == 6
    assert after(output, "The log keeps 6 messages") == messages[-4:]


def test_runnable_history_keeps_users_apart_under_one_conversation_name(
    run: Run, admin: Connection, schema_name: str
) -> None:
    output = run("runnable_history")

    assert answers(output) == [
        "Noted.",
        "You told me: My kettle is blue.",
        "Noted.",
        "You told me: My kettle is red.",
        NOTHING_FOUND,
    ]
    rows = log(admin, schema_name)
    assert {row.session_id for row in rows} == {"kettle"}
    assert [row.user_id for row in rows] == [""] * 4 + ["ada"] * 4 + ["grace"] * 2


# The support bot


class Judged(NamedTuple):
    """One line of the bot's report."""

    mark: str
    keywords: str
    text: str


def report(output: str, session_id: str) -> list[Judged]:
    """Return what the bot reports about a conversation's turns."""
    judged = []
    for line in after(output, f"{session_id}: "):
        mark, *keywords, text = re.split(r"\s{2,}", line.strip())
        judged.append(Judged(mark, keywords[0] if keywords else "", text))
    return judged


def processes(output: str) -> tuple[int, int]:
    """Return the ids of the first process and of the one that it started; that one must name the first."""
    first = re.search(r"^Support bot, process (\d+)$", output, re.MULTILINE)
    second = re.search(r"^A new process, (\d+), started by process (\d+)$", output, re.MULTILINE)
    assert first and second
    assert first[1] == second[2]
    return int(first[1]), int(second[1])


def test_support_bot_knows_the_invoice_and_not_the_parrot_in_a_new_process(
    run: Run, admin: Connection, schema_name: str
) -> None:
    output = run("support_bot")

    first, second = processes(output)
    assert first != second
    before, _, new_process = output.partition("\nA new process")
    kept = [judged for judged in report(before, "demo") if judged.mark == "kept"]
    dropped = [judged for judged in report(before, "demo") if judged.mark == "dropped"]
    assert len(kept) == 2 and len(dropped) == 3
    assert all("invoice" in judged.text and judged.keywords == "invoice" for judged in kept)
    assert any("parrot" in judged.text for judged in dropped)
    known, unknown = answers(new_process)
    assert "INV-1042" in known
    assert unknown == NOTHING_FOUND
    assert after(new_process, "demo: turns that the model is shown: 2") == spoken(admin, schema_name)[:4]
    assert not any("parrot" in row.content for row in log(admin, schema_name))


@pytest.mark.parametrize(
    "keywords", [["invoice", "return", "refund", "size", "order id"], ["promo code", "HAVE A"]], ids=["default", "own"]
)
def test_support_bot_keeps_exactly_the_turns_of_real_dialogues_in_which_a_keyword_occurs(
    keywords: list[str], run: Run, admin: Connection, schema_name: str, shared_data: Path
) -> None:
    file = shared_data / "support_dialogues.jsonl"
    # The first set is the bot's own.
    own = [] if "invoice" in keywords else ["--keywords", *keywords]
    output = run("support_bot", "--dialogues", file, *own)

    reported, _, new_process = output.partition("\nA new process")
    stored = log(admin, schema_name)
    greetings = marks = 0
    for line in file.read_text(encoding="utf-8").splitlines():
        dialogue = json.loads(line)
        name, messages = dialogue["dialogue_id"], dialogue["messages"]
        rows, lines, loaded = [], [], []
        if messages[0]["role"] == "ai":
            greeting = messages.pop(0)["content"]
            greetings += 1
            rows.append(Row(name, "", "ai", greeting, None))
            lines.append(Judged("greeting", "", one_line(greeting)))
        if len(messages) % 2:
            messages.append({"role": "ai", "content": "…"})  # what the stand-in says where the recording has ended
        for human, agent in zip(messages[::2], messages[1::2], strict=True):
            assert (human["role"], agent["role"]) == ("human", "ai")
            said, answer = human["content"], agent["content"]
            found = [
                word for word in keywords if word.casefold() in said.casefold() or word.casefold() in answer.casefold()
            ]
            marks |= 1 if found else 2
            text = f"{one_line(said)} → {one_line(answer)}"
            lines.append(Judged("kept" if found else "dropped", ", ".join(found), text))
            if found:
                rows += [Row(name, "", "human", said, found), Row(name, "", "ai", answer, None)]
                loaded += [f"  Human: {one_line(said)}", f"  AI: {one_line(answer)}"]
        assert [row for row in stored if row.session_id == name] == rows
        assert report(reported, name) == lines
        assert after(new_process, f"{name}: turns that the model is shown: {len(loaded) // 2}") == loaded
    assert greetings and marks == 3, "the dialogues have greetings, turns to keep and turns to drop"
    first, second = processes(output)
    assert first != second


def test_support_bot_hands_the_dsn_to_the_new_process_out_of_sight(
    server_dsn: str, schema_name: str, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, json, sys\n"
        "with open(os.environ['SEEN'], 'a') as seen:\n"
        "    print(json.dumps([os.getpid(), sys.orig_argv, dict(os.environ)]), file=seen)\n"
    )
    seen = tmp_path / "seen"
    marked = f"{server_dsn}{'&' if '?' in server_dsn else '?'}application_name=secret-4711"
    env = {"PYTHONPATH": str(tmp_path), "SEEN": str(seen)}

    result = start("support_bot", "--schema", schema_name, "--dsn", marked, env=env)

    assert (result.returncode, result.stderr) == (0, "")
    (first, *_), (second, command_line, environment) = map(json.loads, seen.read_text().splitlines())
    assert (first, second) == processes(result.stdout)
    assert "INV-1042" in answers(result.stdout)[-2]
    assert "secret-4711" not in json.dumps([command_line, environment]) + result.stdout


def test_support_bot_talks_on_a_terminal_and_remembers_the_last_talk(run: Run) -> None:
    def talk(*texts: str) -> str:
        ours, its = pty.openpty()
        try:
            os.write(ours, "".join(f"{text}\n" for text in texts).encode())
            return run("support_bot", env={"USER": "ada"}, stdin=its)
        finally:
            os.close(ours)
            os.close(its)

    first = talk("My invoice is wrong.", "Nice weather.", "")
    assert "Turns remembered from before: 0." in first
    assert [judged.mark for judged in report(first, "terminal-ada")] == ["kept", "dropped"]

    second = talk("What about my invoice?", "")
    assert "Turns remembered from before: 1." in second
    # What is typed is not in the output, so each answer stands beside the prompt for it.
    assert answers(second.replace("You: ", "")) == ["You told me: My invoice is wrong."]


def test_support_bot_starts_a_database_of_its_own_where_none_is_named(schema_name: str) -> None:
    # Not the test's temporary folder: the server runs as another user when the tests run as root.
    data_home = Path(os.environ[RUN_FOLDER]) / f"data-{schema_name}"
    result = start("support_bot", env={"XDG_DATA_HOME": str(data_home)})

    assert (result.returncode, result.stderr) == (0, "")
    folder = data_home / "pgmemory-examples"
    assert result.stdout.count(f"Database: a local PostgreSQL with its data in {folder}") == 2
    assert "INV-1042" in answers(result.stdout)[-2]
    assert (folder / "pgdata" / "PG_VERSION").exists()
    assert not (folder / "pgdata" / "postmaster.pid").exists(), "the last process to end stops the server"


def test_an_example_says_what_to_install_for_the_model_whose_key_is_set(run: Run) -> None:
    if importlib.util.find_spec("langchain_openai"):
        pytest.skip("langchain-openai is installed")
    output = run("buffer_chat", env={"OPENAI_API_KEY": "key-4711"})

    assert "Model: a stand-in." in output and "pip install langchain-openai" in output
    assert answers(output)[-1] == NOTHING_FOUND
    assert "key-4711" not in output


def test_an_example_asks_the_real_model_if_it_is_there(run: Run, tmp_path: Path) -> None:
    (tmp_path / "langchain_openai.py").write_text(
        "from langchain_core.language_models import FakeListChatModel\n"
        "class ChatOpenAI(FakeListChatModel):\n"
        "    model: str\n"
        "    responses: list[str] = ['from the real one']\n"
    )
    env = {"OPENAI_API_KEY": "key-4711", "OPENAI_MODEL": "gpt-test", "PYTHONPATH": str(tmp_path)}
    output = run("buffer_chat", env=env)

    assert "Model: gpt-test" in output and "stand-in" not in output
    assert set(answers(output)) == {"from the real one"}


def test_an_example_that_reaches_no_database_says_so_without_a_traceback_or_the_password() -> None:
    result = start("support_bot", "--dsn", "postgresql://app:secret-4711@localhost:1/support", env={})

    assert result.returncode == 1
    assert re.fullmatch(r"No database: .*localhost.*\n", result.stderr, re.DOTALL)
    assert "Traceback" not in result.stderr and "secret-4711" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "JSONDecodeError"),
        ('{"messages": []}', "dialogue_id"),
        ('{"dialogue_id": "x", "messages": [1]}', "TypeError"),
    ],
)
def test_support_bot_names_the_line_that_is_no_dialogue(line: str, problem: str, tmp_path: Path) -> None:
    file = tmp_path / "dialogues.jsonl"
    file.write_text('{"dialogue_id": "good", "messages": []}\n' + line + "\n")
    result = start("support_bot", "--dialogues", file, env={})

    assert result.returncode == 1
    assert f"{file}, line 2: this is not a dialogue" in result.stderr and problem in result.stderr

"""The run of other people's tests can fail: what is swapped in, what is noted, and what counts as wrong."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import peers.plugin
import pytest
from fakes import scripted
from peers.excused import EXCUSED, Excuse
from peers.outcomes import FileOutcome, Outcome, section, table, wrong
from peers.stand_ins import HISTORIES, MEMORIES, Conversation, InFile, InMemory, InPostgresTable, InSqlTable, stand_ins
from peers.stand_ins import swap as swap_everywhere
from peers.suites import SUITES, installed_line

from pgmemory import ConversationStore, PostgresChatMessageHistory
from pgmemory.langgraph_store import PostgresItemStore
from pgmemory.memory.base import PostgresChatMemory

MEMORY_MODULE = f"{SUITES[installed_line()][0].distribution.replace('-', '_')}.memory"
WITHOUT_COUNTERPART = {
    "CombinedMemory": "combines memories, ours too",
    "ReadOnlySharedMemory": "wraps a memory, ours too",
    "SimpleMemory": "holds nothing of the conversation",
    "ConversationEntityMemory": "asks the model for entities",
    "ConversationKGMemory": "asks the model for a graph",
    "ConversationVectorStoreTokenBufferMemory": "searches vectors",
    "VectorStoreRetrieverMemory": "searches vectors",
    "MotorheadMemory": "a service",
    "ZepMemory": "a service",
}
FILE, OTHER = "memory/test_a.py", "memory/test_b.py"
STORED, IDLE = Outcome(passed=True, stored=True), Outcome(passed=True, stored=False)
FAILED = Outcome(passed=False, stored=True, why="failed: KeyError: 'x'")
EXCUSE = {f"{FILE}::test_two": Excuse("another thing is expected", "KeyError")}


@pytest.fixture
def replacements(store: ConversationStore, monkeypatch: pytest.MonkeyPatch) -> dict[type, type]:
    """Our class for each of theirs, apart from those that need what only the run of their tests installs."""
    for path in [path for path in HISTORIES if not path.startswith("langchain_core.")]:
        monkeypatch.delitem(HISTORIES, path)
    return stand_ins(store, MEMORY_MODULE)


def test_every_stock_memory_has_a_stand_in_or_no_counterpart() -> None:
    exported = {name for name in import_module(MEMORY_MODULE).__all__ if name.endswith("Memory")}
    assert exported == MEMORIES.keys() | WITHOUT_COUNTERPART.keys()


def test_a_class_is_replaced_in_every_module_under_every_name(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours, other = (type(name, (), {}) for name in ("Theirs", "Ours", "Other"))
    one, two = ModuleType("one"), ModuleType("two")
    vars(one).update(Theirs=theirs, Other=other)
    vars(two).update(Alias=theirs, instance=theirs())
    monkeypatch.setitem(sys.modules, "one", one)
    monkeypatch.setitem(sys.modules, "two", two)
    swap_everywhere({theirs: ours})
    assert (one.Theirs, one.Other, two.Alias) == (ours, other, ours)
    assert type(two.instance) is theirs


@pytest.mark.parametrize("name", MEMORIES)
def test_a_stand_in_takes_the_arguments_of_the_class_it_stands_for(
    replacements: dict[type, type], name: str
) -> None:
    """Also those that LangChain's class leaves out of account, and the model that only some of them take."""
    theirs = getattr(import_module(MEMORY_MODULE), name)
    given: dict[str, Any] = {"memory_key": "past", "ai_prefix": "Bot", "no_such_field": 1}
    if "llm" in theirs.model_fields:
        given["llm"] = scripted("a summary")
    memories = [replacements[theirs](**given) for _ in range(2)]
    assert all(isinstance(memory, MEMORIES[name][0]) for memory in memories)
    memories[0].save_context({"input": "one"}, {"output": "two"})
    assert memories[0].load_memory_variables({}) == {"past": "Human: one\nBot: two"}
    assert memories[1].load_memory_variables({}) == {"past": ""}


def test_histories_meet_where_theirs_would(replacements: dict[type, type]) -> None:
    def same(one: Conversation, other: Conversation) -> bool:
        return one.key == other.key

    assert not same(InMemory(), InMemory())
    assert same(InFile("a.json"), InFile(file_path="a.json"))
    assert not same(InFile("a.json"), InFile("b.json"))
    assert same(InSqlTable("1", "sqlite:///a"), InSqlTable(session_id="1", connection="sqlite:///a", async_mode=True))
    assert not same(InSqlTable("1", "sqlite:///a"), InSqlTable("1", "sqlite:///b"))
    assert not same(InSqlTable("1", "sqlite:///a", "t"), InSqlTable("1", "sqlite:///a", "u"))
    assert same(InPostgresTable("t", "1"), InPostgresTable("t", "1", sync_connection=object()))
    assert not same(InPostgresTable("t", "1"), InPostgresTable("t", "2"))
    for ours in replacements.values():
        assert issubclass(ours, PostgresChatMemory | PostgresChatMessageHistory | PostgresItemStore)


def test_histories_in_memory_are_equal_when_what_is_stored_is(replacements: dict[type, type]) -> None:
    one, other = InMemory(), InMemory()
    assert one == other
    one.add_user_message("hello")
    assert one != other
    assert one == InMemory(messages=one.messages)


def test_the_plugin_notes_what_became_of_each_test(
    server_dsn: str,
    replacements: dict[type, type],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swapped: list[dict[type, type]] = []
    monkeypatch.setattr(peers.plugin, "swap", swapped.append)
    monkeypatch.setenv(peers.plugin.DSN, server_dsn)
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_theirs.py").write_text(
        "import pytest\n"
        "from peers.stand_ins import InMemory\n"
        "@pytest.fixture\n"
        "def broken(): yield; raise OSError('at the end')\n"
        "def test_stores(): InMemory().add_user_message('hello')\n"
        "def test_stores_nothing(): pass\n"
        "def test_fails(): assert InMemory().messages, 'nothing there'\n"
        "def test_is_skipped(): pytest.skip('no server')\n"
        "def test_ends_badly(broken): pass\n"
    )
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(tmp_path)]
    plugin = peers.plugin.Peers(tmp_path / "outcomes.json", MEMORY_MODULE)
    assert pytest.main([*options, str(tmp_path / "test_theirs.py")], plugins=[plugin]) == pytest.ExitCode.TESTS_FAILED
    outcomes = {
        name.partition("::")[2]: Outcome(**noted)
        for name, noted in json.loads((tmp_path / "outcomes.json").read_text()).items()
    }
    assert [(name, outcome.passed, outcome.stored) for name, outcome in outcomes.items()] == [
        ("test_stores", True, True),
        ("test_stores_nothing", True, False),
        ("test_fails", False, True),
        ("test_is_skipped", False, False),
        ("test_ends_badly", False, False),
    ]
    assert "failed: AssertionError: nothing there" in outcomes["test_fails"].why
    assert "skipped" in outcomes["test_is_skipped"].why
    assert outcomes["test_ends_badly"].why == "failed: OSError: at the end"
    assert [set(classes) for classes in swapped] == [set(replacements)]


def one_file(**tests: Outcome) -> FileOutcome:
    return FileOutcome("theirs 1.0", FILE, {f"{FILE}::{name}": outcome for name, outcome in tests.items()})


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        ({"test_one": STORED, "test_two": FAILED}, None),
        ({"test_one": FAILED, "test_two": FAILED}, "test_one failed: KeyError"),
        ({"test_one": STORED, "test_two": Outcome(False, True, "failed: OSError")}, "test_two failed: OSError"),
        ({"test_one": STORED, "test_two": STORED}, "test_two is excused and passed"),
        ({"test_one": STORED}, "test_two is excused and was not run"),
        ({"test_one": IDLE, "test_two": Outcome(False, False, "KeyError")}, f"{FILE} shows nothing"),
    ],
    ids=["right", "unknown failure", "another failure", "excused and passed", "excused and gone", "nothing stored"],
)
def test_what_is_wrong_fails_the_run(tests: dict[str, Outcome], said: str | None) -> None:
    lines = wrong([one_file(**tests)], EXCUSE)
    assert len(lines) == (0 if said is None else 1), lines
    assert said is None or said in lines[0]


def test_an_excuse_for_a_file_of_the_other_line_is_no_fault() -> None:
    other = FileOutcome("theirs 1.0", OTHER, {f"{OTHER}::test_one": STORED})
    assert wrong([other], EXCUSE) == []


def test_every_excuse_is_for_a_file_that_is_run() -> None:
    files = {file for suites in SUITES.values() for suite in suites for file in suite.files}
    assert {name.partition("::")[0] for name in EXCUSED} <= files


def test_the_section_has_the_table_and_the_reasons() -> None:
    files = [
        one_file(test_one=STORED, test_two=FAILED),
        FileOutcome("others 2.0", OTHER, {f"{OTHER}::test_one": STORED, f"{OTHER}::test_three": IDLE}),
    ]
    assert table(files) == (
        "| from | file | tests | that reach PostgreSQL | passed | excused |\n"
        "|---|---|---:|---:|---:|---:|\n"
        f"| theirs 1.0 | `{FILE}` | 2 | 2 | 1 | 1 |\n"
        f"| others 2.0 | `{OTHER}` | 2 | 1 | 2 | 0 |\n"
        "| **all** | | **4** | **3** | **3** | **1** |"
    )
    text = section("LangChain 9", files, {**EXCUSE, "elsewhere.py::test_x": Excuse("never said", "")})
    assert text == (
        f"## LangChain 9\n\n{table(files)}\n\nExcused:\n\n- `test_two`: another thing is expected."
    )

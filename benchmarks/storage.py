"""Row 8: what a message takes on disk."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from benchmarks.dialogues import Dialogue
from benchmarks.peers import LANGCHAIN_POSTGRES, LANGGRAPH, TABLES, open_peers
from benchmarks.rows import Result, Spread, Target
from benchmarks.server import run
from benchmarks.setting import Setting
from pgmemory import BufferMemory, ConversationStore, PostgresChatMemory, TokenWindowMemory

_TARGET = Target(0.8)
_OURS = {"BufferMemory": BufferMemory, "TokenWindowMemory (with counts)": TokenWindowMemory}


def measure(setting: Setting) -> Iterator[Result]:
    """Measure the row."""
    dialogues = setting.dialogues.all
    rounds = 3 if setting.quick else 20
    messages = sum(len(turn) for dialogue in dialogues for turn in dialogue)
    bytes_each: dict[str, float] = {}
    with open_peers(setting.dsn) as peers:
        tables = TABLES[LANGCHAIN_POSTGRES] + TABLES[LANGGRAPH]
        run(setting.dsn, f"truncate {', '.join(table for table in tables if table != 'checkpoint_migrations')}")
        for _ in range(rounds):
            for dialogue in dialogues:
                history = peers.langchain_postgres_history()
                for turn in dialogue:
                    history.add_messages(turn)
        for dialogue in dialogues:
            thread = peers.thread()
            for turn in dialogue:
                thread.add(turn)
    bytes_each[LANGCHAIN_POSTGRES] = _bytes(setting.dsn, TABLES[LANGCHAIN_POSTGRES]) / (messages * rounds)
    bytes_each[LANGGRAPH] = _bytes(setting.dsn, TABLES[LANGGRAPH]) / messages
    for number, (name, memory_class) in enumerate(_OURS.items()):
        schema = f"storage_{number}"
        with ConversationStore(setting.dsn, schema=schema) as store:
            store.setup()
            for _ in range(rounds):
                for dialogue in dialogues:
                    _save(memory_class(session_id=uuid.uuid4(), store=store), dialogue)
        names = ("conversations", "conversation_messages", "conversation_summaries", "schema_migrations")
        bytes_each[name] = _bytes(setting.dsn, [f"{schema}.{table}" for table in names]) / (messages * rounds)
    for name in _OURS:
        absolute = f"{bytes_each[name]:,.0f} against {bytes_each[LANGCHAIN_POSTGRES]:,.0f} bytes a message"
        yield Result(8, name, _TARGET, _ratio(bytes_each, name), absolute, {LANGGRAPH: _ratio(bytes_each, LANGGRAPH)})


def _ratio(bytes_each: dict[str, float], name: str) -> Spread:
    return Spread.of([bytes_each[name] / bytes_each[LANGCHAIN_POSTGRES]])


def _save(memory: PostgresChatMemory, dialogue: Dialogue) -> None:
    for turn in dialogue:
        *said, answer = turn
        if said:
            memory.save_context({"input": said}, {"output": answer})
        else:  # a greeting, or what nobody answered
            memory.chat_memory.add_messages(turn)


def _bytes(dsn: str, tables: list[str]) -> int:
    run(dsn, *(f"vacuum full {table}" for table in tables))
    sizes = " + ".join(f"pg_total_relation_size('{table}')" for table in tables)
    ((size,),) = run(dsn, f"select {sizes}")
    return int(size)

"""A support bot that remembers what matters: only turns in which a keyword occurs are stored and shown to the model.

    python examples/support_bot.py                     talk to it; where there is no terminal, it shows a conversation
    python examples/support_bot.py --dialogues FILE    run recorded dialogues through it, one a line, as JSON:
        {"dialogue_id": "…", "messages": [{"role": "human" or "ai", "content": "…"}, …]}

At the end it starts itself anew, as another process, which shows what it still knows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from _common import (
    ConversationChain,
    StandInModel,
    argument_parser,
    one_line,
    open_store,
    real_model,
    say,
    say_messages,
)
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.messages import AIMessage, BaseMessage

from pgmemory import ConversationStore, RelevantTurnMemory

KEYWORDS = ["invoice", "return", "refund", "size", "order id"]

DEMO = "demo"
DEMO_TEXTS = [
    "Hello! Is it raining where you are?",
    "My invoice INV-1042 says 120 euros, but we agreed on 100.",
    "My parrot Kiki says hello, too.",
    "Please send the corrected invoice to ada@example.com.",
    "Do you remember my parrot?",
]
DEMO_QUESTIONS_LATER = ["What was wrong with my invoice?", "What is the name of my parrot?"]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--dialogues", metavar="FILE", help="run through these dialogues")
    parser.add_argument("--keywords", nargs="+", default=KEYWORDS, metavar="TEXT", help="default: %(default)s")
    parser.add_argument("--recall", action="store_true", help=argparse.SUPPRESS)  # for the process that it starts
    arguments = parser.parse_args()
    if not all(keyword.strip() for keyword in arguments.keywords):
        parser.error("argument --keywords: a keyword must not be blank")
    if arguments.recall:
        recall(**json.load(sys.stdin))
        return
    dialogues = read_dialogues(arguments.dialogues) if arguments.dialogues else []
    say(f"Support bot, process {os.getpid()}", "bold")
    real = real_model()
    with open_store(arguments.dsn, arguments.schema) as store:
        say(f"Keywords: {', '.join(arguments.keywords)}", "dim")
        if arguments.dialogues:
            if real is None:
                say("The stand-in says what the agent answered in the recording.", "dim")
            sessions = [replay(dialogue, store, arguments.keywords, real) for dialogue in dialogues]
        elif sys.stdin.isatty():
            # One database may serve several people.
            sessions = [f"terminal-{os.environ.get('USER', 'unknown')}"]
            memory = make_memory(sessions[0], store, arguments.keywords)
            remembered = count_turns(memory.buffer_as_messages)
            say(f"\nTurns remembered from before: {remembered}. An empty line ends the conversation.", "dim")
            report(memory, converse(memory, real or StandInModel(), typed()))
        else:
            sessions = [DEMO]
            memory = make_memory(DEMO, store, arguments.keywords)
            memory.clear()  # so that every run of the demo begins with an empty conversation
            report(memory, converse(memory, real or StandInModel(), spoken(DEMO_TEXTS)))
    # The store is closed. What the new process needs to know goes through its standard input: command lines can be
    # read by everybody on the machine, and the DSN may hold a password.
    knowledge = {"dsn": arguments.dsn, "schema": arguments.schema, "keywords": arguments.keywords, "sessions": sessions}
    new_process = subprocess.run([sys.executable, __file__, "--recall"], input=json.dumps(knowledge), text=True)
    sys.exit(new_process.returncode)


def make_memory(session_id: str, store: ConversationStore, keywords: list[str]) -> RelevantTurnMemory:
    """Return the bot's memory of a conversation."""
    return RelevantTurnMemory(session_id=session_id, store=store, keywords=keywords)


def count_turns(messages: list[BaseMessage]) -> int:
    return sum(message.type == "human" for message in messages)


def converse(
    memory: RelevantTurnMemory, llm: BaseChatModel, texts: Iterable[str], *, aloud: bool = True
) -> list[tuple[str, str]]:
    """Let the bot answer these texts; return what was said and answered, by turns."""
    chain = ConversationChain(llm=llm, memory=memory)
    turns = []
    for text in texts:
        answer = chain.invoke({"input": text})["response"]
        turns.append((text, answer))
        if aloud:
            say(f"Bot: {one_line(answer)}")
    return turns


def spoken(texts: list[str]) -> Iterator[str]:
    """Yield texts as if somebody typed them."""
    say("")
    for text in texts:
        say(f"You: {text}")
        yield text


def typed() -> Iterator[str]:
    """Yield what somebody types, up to an empty line or the end of the input."""
    while True:
        try:
            text = input("You: ").strip()
        except (EOFError, KeyboardInterrupt):
            text = ""
            say("")
        if not text:
            return
        yield text


def report(memory: RelevantTurnMemory, turns: list[tuple[str, str]]) -> None:
    """Show which turns are in the database, with the keywords found in them, and which were dropped."""
    history = memory.chat_memory
    rows = history.store.list_messages(history.session_id)
    # A turn's keywords stand with its first message.
    kept = {
        (said.content, answer.content): ", ".join(said.tags or ())
        for said, answer in pairwise(rows)
        if said.role == "human" and answer.role == "ai"
    }
    width = max(map(len, kept.values()), default=0)
    say(f"\n{history.session_id}: {sum(turn in kept for turn in turns)} of {len(turns)} turns kept", "bold")
    for row in rows:
        if row.role == "human":
            break
        say(f"  {'greeting':8}  {'':{width}}  {one_line(row.content)}", cut=True)
    for turn in turns:
        mark, style = ("kept", "green") if turn in kept else ("dropped", "dim")
        said, answer = map(one_line, turn)
        say(f"  {mark:8}  {kept.get(turn, ''):{width}}  {said} → {answer}", style, cut=True)


# Recorded dialogues


@dataclass
class Dialogue:
    """A recorded dialogue: what the agent said first, then what the customer said and the agent answered, by turns."""

    session_id: str
    greeting: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


def read_dialogues(path: str) -> list[Dialogue]:
    """Read a file of dialogues, one a line, as JSON; end the program if it holds anything else."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.readlines()
    except (OSError, ValueError) as error:
        sys.exit(f"cannot read the dialogues: {error}")
    dialogues = []
    for number, line in enumerate(lines, start=1):
        try:
            dialogues.append(to_dialogue(json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            sys.exit(f"{path}, line {number}: this is not a dialogue: {type(error).__name__}: {error}")
    return dialogues


def to_dialogue(record: dict[str, Any]) -> Dialogue:
    """Divide a record's messages into turns: several answers to one text are joined, calls of tools are left out."""
    dialogue = Dialogue(record["dialogue_id"])
    for message in record["messages"]:
        role, text = message["role"], message["content"]
        if role == "human":
            dialogue.texts.append(text)
            dialogue.answers.append("")
        elif role == "ai" and not dialogue.texts:
            dialogue.greeting.append(text)
        elif role == "ai":
            dialogue.answers[-1] = f"{dialogue.answers[-1]}\n{text}".strip()
    return dialogue


def replay(dialogue: Dialogue, store: ConversationStore, keywords: list[str], real: BaseChatModel | None) -> str:
    """Run a dialogue through the bot and return its session id. Without a real model it says what the agent did."""
    memory = make_memory(dialogue.session_id, store, keywords)
    memory.clear()  # so that running the same file again gives the same
    # What the agent says first belongs to no turn, so nothing filters it: it goes straight into the log.
    memory.chat_memory.add_messages([AIMessage(text) for text in dialogue.greeting])
    # A chain always answers, also where the recording ends without an answer.
    llm = real or FakeListChatModel(responses=[answer or "…" for answer in dialogue.answers])
    report(memory, converse(memory, llm, dialogue.texts, aloud=False))
    return dialogue.session_id


# The new process


def recall(dsn: str | None, schema: str, keywords: list[str], sessions: list[str]) -> None:
    """Show what the model will be shown of these conversations."""
    say(f"\nA new process, {os.getpid()}, started by process {os.getppid()}", "bold")
    llm = real_model() or StandInModel()
    with open_store(dsn, schema) as store:
        for session_id in sessions:
            memory = make_memory(session_id, store, keywords)
            messages = memory.buffer_as_messages
            say(f"\n{session_id}: turns that the model is shown: {count_turns(messages)}", "bold")
            say_messages(messages)
        if sessions == [DEMO]:
            converse(memory, llm, spoken(DEMO_QUESTIONS_LATER))


if __name__ == "__main__":
    main()

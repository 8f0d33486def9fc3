"""What the examples share: which model, which database, LangChain's two lines, and how they print.

Not part of pgmemory: an application chooses all of this for itself.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from langchain_core.language_models import BaseChatModel, SimpleChatModel
from langchain_core.messages import BaseMessage
from rich.console import Console
from rich.text import Text

from pgmemory import ConversationStore, LocalServerError, PgMemoryError

try:  # beside LangChain 1.x the legacy chains are a package of their own
    from langchain_classic.chains import ConversationChain as ConversationChain
except ModuleNotFoundError:  # LangChain 0.3
    from langchain.chains import ConversationChain as ConversationChain  # type: ignore[no-redef]

# LangChain announces the end of these two whenever one is made, in both lines. These examples are for those who have
# such chains and know, so these two texts alone are left out; every other warning, LangChain's or ours, is still seen.
warnings.filterwarnings("ignore", message="The class `ConversationChain` was deprecated")
warnings.filterwarnings("ignore", message="RunnableWithMessageHistory is deprecated")

console = Console(highlight=False)
# What people said may hold characters that the terminal's encoding lacks, or halves of a surrogate pair.
sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]


def legacy_agents() -> Any:
    """Import LangChain's module of legacy agents, ``langchain_classic.agents`` or ``langchain.agents``."""
    line = ConversationChain.__module__.partition(".")[0]
    with warnings.catch_warnings():
        # On 1.x this imports langchain-community, which announces its own end.
        warnings.filterwarnings("ignore", message="`langchain-community` is being sunset", category=DeprecationWarning)
        return import_module(f"{line}.agents")


# The model


def real_model() -> BaseChatModel | None:
    """Return OpenAI's model if $OPENAI_API_KEY is set and langchain-openai installed; say what is used."""
    if not os.environ.get("OPENAI_API_KEY"):
        say("Model: a stand-in, which works offline; set OPENAI_API_KEY for a real one.", "dim")
        return None
    try:
        from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]
    except ModuleNotFoundError:
        say("Model: a stand-in. OPENAI_API_KEY is set, but for a real one: pip install langchain-openai", "yellow")
        return None
    name = os.environ.get("OPENAI_MODEL", "gpt-4o-mini")
    say(f"Model: {name} ($OPENAI_MODEL names another)", "dim")
    model: BaseChatModel = ChatOpenAI(model=name)
    return model


class StandInModel(SimpleChatModel):
    """Answer questions from the memory that stands in the prompt and from nothing else, so that one sees it at work."""

    @property
    def _llm_type(self) -> str:
        return "stand-in"

    def _call(self, messages: list[BaseMessage], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        told, question = _read_prompt(messages)
        if "?" not in question:
            return "Noted."
        found = [text for text in told if "?" not in text and _words(text) & _words(question)]
        return "You told me: " + " / ".join(found) if found else "I find nothing about that in my memory."


def _read_prompt(messages: list[BaseMessage]) -> tuple[list[str], str]:
    """Return what is remembered, without what the AI said, and what the human says now."""
    *earlier, last = messages
    _, is_text, conversation = str(last.content).partition("Current conversation:\n")
    if not is_text:
        return [str(message.content) for message in earlier if message.type == "human"], str(last.content)
    # ConversationChain's prompt holds the whole conversation in one text.
    history, _, question = conversation.removesuffix("\nAI:").rpartition("\nHuman: ")
    parts = re.split(r"^(Human|AI|System): ", history, flags=re.MULTILINE)
    return [text.strip() for who, text in zip(parts[1::2], parts[2::2], strict=True) if who != "AI"], question


def _words(text: str) -> set[str]:
    small = {"about", "does", "know", "remember", "tell", "that", "this", "what", "when", "which", "with", "your"}
    return {word for word in re.findall(r"\w{4,}", text.casefold())} - small


# The database


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of the arguments that all examples take; the description is the example's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--dsn",
        help="the database; without it $DATABASE_URL, which is better for a password, since everybody on the machine "
        "can read command lines; without both a local PostgreSQL is started",
    )
    parser.add_argument("--schema", default="pgmemory_examples", help="PostgreSQL schema to use (%(default)s)")
    return parser


@contextmanager
def open_store(dsn: str | None, schema: str) -> Iterator[ConversationStore]:
    """Open the store that the arguments name, say which it is, and close it at the end."""
    source = dsn or os.environ.get("DATABASE_URL")
    try:
        if source:
            store = ConversationStore(source, schema=schema)
            store.setup()
            say(f"Database: the one in {'--dsn' if dsn else '$DATABASE_URL'}, schema {schema}", "dim")
        else:
            folder = _local_folder()
            store = ConversationStore.embedded(folder, schema=schema)
            say(f"Database: a local PostgreSQL with its data in {folder}; set DATABASE_URL for your own.", "dim")
    except (PgMemoryError, LocalServerError) as error:
        sys.exit(f"No database: {error}")
    with store:
        yield store


def _local_folder() -> Path:
    """Return a folder for this user's data, a temporary one for accounts without a home of their own."""
    data_home = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    user = os.getuid() if hasattr(os, "getuid") else None  # Windows has none
    try:
        os.makedirs(data_home, exist_ok=True)
        if user is None or os.stat(data_home).st_uid == user:
            return Path(data_home, "pgmemory-examples")
    except OSError:
        pass
    return Path(tempfile.gettempdir(), f"pgmemory-examples-{user}")


# Printing


def say(text: str, style: str = "", *, cut: bool = False) -> None:
    """Print a line; on a terminal ``cut`` fits it to the width. Piped, a line is never broken or cut."""
    if cut and console.is_terminal:
        console.print(Text(text, style), no_wrap=True, overflow="ellipsis")
    else:
        console.print(Text(text, style), soft_wrap=True)


def one_line(text: str) -> str:
    """Return what somebody said on one line and without control characters, which could steer a terminal."""
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())


def say_messages(messages: list[BaseMessage]) -> None:
    """Print messages, one a line."""
    for message in messages:
        who = "AI" if message.type == "ai" else message.type.capitalize()
        say(f"  {who}: {one_line(str(message.content))}", cut=True)

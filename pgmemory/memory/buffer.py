"""All turns, or the last `k` of them."""

from __future__ import annotations

from typing import Any

from langchain_core.messages import BaseMessage
from pydantic import Field

from pgmemory.history import to_logged, to_logged_window
from pgmemory.memory.base import PostgresChatMemory, messages_of
from pgmemory.turns import shown, shown_preamble, split_turns


class BufferMemory(PostgresChatMemory):
    """Show the whole conversation, or its last `k` turns and the system messages from before the first turn.

    Attributes:
        k: How many turns; None for all and the preamble, 0 for none.
    """

    k: int | None = Field(default=None, ge=0)

    def select_messages(self, inputs: dict[str, Any]) -> list[BaseMessage]:
        """Return the last `k` turns, or everything. One round trip; reads no older row."""
        key = self.chat_memory.key
        if self.k is None:
            preamble, turns = split_turns([to_logged(stored) for stored in self._store.read_all(key)])
            return messages_of([shown_preamble(preamble), *map(shown, turns)])
        window = to_logged_window(self._store.read_last_turns(key, turns=self.k))
        _, turns = split_turns(window.messages)
        last = turns[len(turns) - self.k :] if self.k < len(turns) else turns
        return messages_of([window.system, *map(shown, last)])

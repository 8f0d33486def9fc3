"""All turns, or the last `k` of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from pgmemory.logged import to_logged, to_logged_window
from pgmemory.memory.base import PostgresChatMemory
from pgmemory.memory.selection import Selection, Verdict, beyond_k
from pgmemory.turns import Turn, shown, shown_preamble, split_turns


class BufferMemory(PostgresChatMemory):
    """Show the whole conversation, or its last `k` turns and the system messages from before the first turn.

    Attributes:
        k: How many turns; None for all and the preamble, 0 for none.
    """

    k: int | None = Field(default=None, ge=0)

    def _select(self, inputs: dict[str, Any]) -> Selection:
        """Return the last `k` turns, or everything. One round trip; reads no older row."""
        key, before = self.chat_memory.key, self.chat_memory.before
        if self.k is None:
            preamble, turns = split_turns([to_logged(stored) for stored in self._store.read_all(key, before=before)])
            return Selection(shown_preamble(preamble), [*map(shown, turns)])
        window = to_logged_window(self._store.read_last_turns(key, turns=self.k, before=before))
        _, turns = split_turns(window.messages)
        last = turns[len(turns) - self.k :] if self.k < len(turns) else turns
        return Selection(window.system, [*map(shown, last)])

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        if self.k is None:
            return [Verdict("kept", "The whole conversation is shown.")] * len(turns)
        older = max(0, len(turns) - self.k)
        return [beyond_k(self.k)] * older + [Verdict("kept", f"Among the last {self.k} turns.")] * (len(turns) - older)

    def _settings(self, selection: Selection) -> dict[str, Any]:
        return {"k": self.k}

"""The turns of a user's past that matter for the current input, and the newest turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from langchain_core.messages import BaseMessage, HumanMessage
from pydantic import Field, model_validator
from typing_extensions import Self

from pgmemory.errors import EncryptionError
from pgmemory.formats import text_of
from pgmemory.logged import to_logged
from pgmemory.memory.selection import Selection, Verdict
from pgmemory.memory.token_limit import TokenLimit, TokenLimitMemory, system_of, validated_limit
from pgmemory.models import StoredMessage
from pgmemory.said import to_messages
from pgmemory.store.recall import RecallBy, RecalledTurn
from pgmemory.turns import Turn, shown


class RecallMemory(TokenLimitMemory):
    """Show the newest turns, and before them the turns of this user's past that matter for the current input.

    They are found by the words that they share with the input, by their meaning where the store has embeddings, and by
    both together (see `ConversationStore.recall`), from the whole past, whether or not this memory stored it, and shown
    whole, oldest first, after the preamble's system messages. Turns of other conversations look like those of this
    one. The schema must have been set up with ``search``; encrypted conversations cannot be recalled.

    Where there is no input, as for `buffer` or `as_history`, the newest turns alone are shown.

    Attributes:
        max_token_limit: The limit for all that is loaded, as messages, or a function of the chain's inputs that
            returns it. The newest turns come first, then what matters most: a recalled turn that does not fit is
            passed over.
        k: How many of the newest turns are shown.
        recall_from: Whether to recall from all conversations of the ``"user"``, without logs that agents keep beside
            them, or from this ``"session"`` alone; the same without a user.
        recall_by: How they are found: by their ``"words"``, their ``"meaning"`` or ``"both"``; None for both where
            the store can, else for words. Words alone where the embedder fails.
        max_recalled: How many messages are recalled at most, each with its turn.
    """

    max_token_limit: TokenLimit = 2000
    k: int = Field(default=4, ge=0)
    recall_from: Literal["user", "session"] = "user"
    recall_by: RecallBy | None = None
    max_recalled: int = Field(default=10, ge=0)

    @model_validator(mode="after")
    def _check_fields(self) -> Self:
        if not callable(self.max_token_limit):
            validated_limit(self.max_token_limit, {})
        if self._store.keyring is not None:
            raise EncryptionError(
                "RecallMemory finds turns by their words and their meaning, which are not kept of what is encrypted: "
                "give it a store without a keyring"
            )
        return self

    def _select(self, inputs: dict[str, Any]) -> Selection:
        """Return the newest turns and those that matter. One round trip, where messages were counted when stored."""
        limit = validated_limit(self.max_token_limit, inputs)
        if limit == 0:
            return Selection([], [], limit)
        recalled = self._store.recall(
            self.chat_memory.key,
            self._asked(inputs),
            k=self.max_recalled,
            by=self.recall_by,
            whole_user=self.recall_from == "user",
            turns=self.k,
            before=self.chat_memory.before,
        )
        window = self._counted(recalled.window)
        newest = self._newest_turns([window], head_of=system_of, limit=limit, max_turns=self.k)
        if len(newest.head) < len(window.system):
            return newest  # the system messages alone pass the limit
        chosen: list[tuple[RecalledTurn, Turn]] = []
        # A fork bears its source's turns, with their times: they are shown once.
        shown_now = {logged.message_index for turn in newest.turns for logged in turn}
        seen = {
            _what_was_said(stored): self.chat_memory.session_id
            for stored in recalled.window.messages
            if stored.message_index in shown_now
        }
        for recalled_turn in recalled.turns:
            said = _what_was_said(recalled_turn.messages[0])
            if seen.setdefault(said, recalled_turn.session_id) != recalled_turn.session_id:
                continue
            turn = shown(self._logged(recalled_turn.messages))
            others = [other for _, other in chosen]
            if turn and self._count([newest.head, *others, turn, *newest.turns]) <= limit:
                chosen.append((recalled_turn, turn))
        chosen.sort(key=lambda pair: _place(pair[0]))
        elsewhere = {
            id(logged.message): found.session_id
            for found, turn in chosen
            if found.session_id != self.chat_memory.session_id
            for logged in turn
        }
        return Selection(newest.head, [*(turn for _, turn in chosen), *newest.turns], limit, elsewhere)

    def _asked(self, inputs: dict[str, Any]) -> str:
        """Return the text of what the human says in this call; empty where there is no call."""
        if not inputs.keys() - {*self.memory_variables, "stop"}:
            return ""
        said = self._input_said(inputs)
        return "\n".join(text_of(message) for message in to_messages(inputs[said], HumanMessage, f"inputs[{said!r}]"))

    def _logged(self, messages: Sequence[StoredMessage]) -> Turn:
        encoding = self._counter.encoding
        return self._with_counts([to_logged(stored, encoding) for stored in messages])

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        own = {
            logged.message_index
            for turn in selection.turns
            for logged in turn
            if id(logged.message) not in selection.elsewhere
        }
        first_of_newest = len(turns) - self.k
        verdicts = []
        for number, turn in enumerate(turns):
            is_shown = any(logged.message_index in own for logged in turn)
            if number >= first_of_newest and (is_shown or not shown(turn)):
                verdicts.append(Verdict("kept", f"Among the last {self.k} turns."))
            elif number >= first_of_newest:
                reason = f"With the newest turns up to this one the limit of {selection.limit} tokens is passed."
                verdicts.append(Verdict("beyond_limit", reason))
            elif is_shown:
                verdicts.append(Verdict("kept", "Recalled: it matters for the input, or what stands beside it does."))
            else:
                reason = f"Neither among the last {self.k} turns nor recalled within {selection.limit} tokens."
                verdicts.append(Verdict("irrelevant", reason))
        return verdicts

    def _settings(self, selection: Selection) -> dict[str, Any]:
        return {
            "k": self.k,
            "recall_from": self.recall_from,
            "recall_by": self.recall_by,
            "max_recalled": self.max_recalled,
            "max_token_limit": selection.limit,
        }

    def _save_turn(self, messages: list[BaseMessage]) -> None:
        self._append(messages, counter=self._single_counter)


def _what_was_said(stored: StoredMessage) -> tuple[Any, ...]:
    # Not by its number: what follows a turn that is replaced by a longer one moves up.
    return stored.created_at, stored.role, stored.content


def _place(found: RecalledTurn) -> tuple[Any, ...]:
    """Return by what recalled turns are put in order: when they were said; then by their place in a conversation."""
    first = found.messages[0]
    return first.created_at, found.session_id, first.message_index

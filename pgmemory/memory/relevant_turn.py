"""The turns in which a keyword occurs."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Annotated, Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from pydantic import AfterValidator, Field, PrivateAttr, model_validator
from typing_extensions import Self

from pgmemory.errors import ConfigurationError
from pgmemory.formats import text_of
from pgmemory.keywords import KeywordRule
from pgmemory.logged import LoggedWindow
from pgmemory.memory.selection import Selection, Verdict, beyond_k
from pgmemory.memory.token_limit import TokenLimit, TokenLimitMemory, system_of, validated_limit
from pgmemory.models import AFTER_ALL
from pgmemory.turns import Turn, split_turns

_logger = logging.getLogger(__name__)

_FIRST_PAGE_TURNS = 32


class RelevantTurnMemory(TokenLimitMemory):
    """Show the turns in which a keyword occurs in what the human or the AI said, and store only those.

    A turn is relevant if one of `keywords` occurs in it or `is_relevant` says so. The view shows only turns that pass
    its own rule, whoever stored them: the verdict of keywords is stored with a turn, and a turn without this rule's
    verdict is judged when it is loaded. In an encrypted conversation all turns are: a verdict, which would
    tell of keywords, is not stored there.

    Attributes:
        keywords: Literal texts, compared without regard to case (see `pgmemory.keywords`).
        is_relevant: A test of one's own: a function of a turn's messages. It is asked at every load about every turn
            in which no keyword occurs, so keep it cheap.
        whole_words: Find keywords as whole words only, else anywhere.
        keep_irrelevant: Store irrelevant turns too, without showing them.
        k: At most this many turns; None for all.
        max_token_limit: At most this many tokens, or a function of the chain's inputs that returns how many; None
            for no limit.
    """

    # A tuple, so that nobody changes it in place without the rule's being made anew.
    keywords: Annotated[Sequence[str], AfterValidator(tuple)] = ()
    is_relevant: Callable[[Sequence[BaseMessage]], bool] | None = Field(default=None, exclude=True, repr=False)
    whole_words: bool = False
    keep_irrelevant: bool = False
    k: int | None = Field(default=None, ge=0)
    max_token_limit: TokenLimit | None = None

    _rule: KeywordRule = PrivateAttr()

    @model_validator(mode="after")
    def _make_rule(self) -> Self:
        if not self.keywords and self.is_relevant is None:
            raise ConfigurationError("give keywords, is_relevant, or both: without them no turn would be relevant")
        if self.max_token_limit is not None and not callable(self.max_token_limit):
            validated_limit(self.max_token_limit, {})
        if self.is_relevant is not None and inspect.iscoroutinefunction(self.is_relevant):
            raise ConfigurationError("is_relevant must be an ordinary function: a coroutine is not awaited")
        self._rule = KeywordRule(self.keywords, whole_words=self.whole_words)
        return self

    def _select(self, inputs: dict[str, Any]) -> Selection:
        """Return the newest relevant turns. One round trip, where turns bear the verdict of this memory's rule."""
        limit = None if self.max_token_limit is None else validated_limit(self.max_token_limit, inputs)
        key = self.chat_memory.key
        pages = self._pages(
            lambda turns, before: self._store.read_relevant_turns(
                key, turns=turns, rule=self._fingerprint, before=before
            ),
            self._first_page_turns(limit),
            counted=limit is not None,
        )
        return self._newest_turns(map(self._only_relevant, pages), head_of=system_of, limit=limit, max_turns=self.k)

    def _first_page_turns(self, limit: int | None) -> int:
        if self.k is not None:
            return max(1, self.k)
        return AFTER_ALL if limit is None else _FIRST_PAGE_TURNS

    @property
    def _fingerprint(self) -> str | None:
        # A function's verdict can change with whatever it reads, so none is stored for rules that have one.
        return self._rule.fingerprint if self.is_relevant is None else None

    def _only_relevant(self, window: LoggedWindow) -> LoggedWindow:
        _, turns = split_turns(window.messages)
        return replace(window, messages=list(chain.from_iterable(turn for turn in turns if self._passes(turn))))

    def _passes(self, turn: Turn) -> bool:
        return self._found(turn) is not None

    def _found(self, turn: Turn) -> Sequence[str] | None:
        """Return what `_judge` says of a turn, or said of it when it was stored."""
        rule = self._fingerprint
        # What was added to a turn after it was judged bears no verdict. And as of a message, the last turn may go on.
        is_whole = turn[-1].message_index < self.chat_memory.before - 1
        if rule is not None and is_whole and all(logged.judged_by == rule for logged in turn):
            return turn[0].tags
        return self._judge([logged.message for logged in turn])

    def _verdicts(self, turns: Sequence[Turn], selection: Selection) -> list[Verdict]:
        found = [self._found(turn) for turn in turns]
        relevant = [place for place, keywords in enumerate(found) if keywords is not None]
        first = 0 if self.k is None else max(0, len(relevant) - self.k)
        reason = "No keyword occurs in its turn." if self.keywords else "is_relevant does not find its turn relevant."
        if self.keywords and self.is_relevant is not None:
            reason = "No keyword occurs in its turn, and is_relevant does not find it relevant."
        verdicts = [Verdict("irrelevant", reason)] * len(turns)
        for place in relevant[:first]:
            verdicts[place] = beyond_k(self.k or 0, "relevant turns")
        newest = relevant[first:]
        by_limit = self._verdicts_by_limit([turns[place] for place in newest], selection)
        for place, verdict in zip(newest, by_limit, strict=True):
            verdicts[place] = _relevant(found[place] or ()) if verdict.code == "kept" else verdict
        return verdicts

    def _settings(self, selection: Selection) -> dict[str, Any]:
        return {
            "keywords": list(self.keywords),
            "whole_words": self.whole_words,
            "is_relevant": self.is_relevant is not None,
            "k": self.k,
            "max_token_limit": selection.limit,
        }

    def _judge(self, messages: list[BaseMessage]) -> list[str] | None:
        """Return the keywords found, none of them if only `is_relevant` agreed; None for an irrelevant turn."""
        said = [text_of(message) for message in messages if isinstance(message, (HumanMessage, AIMessage))]
        found = self._rule.find(said)
        if found or (self.is_relevant is not None and self.is_relevant(messages)):
            return found
        return None

    def _save_turn(self, messages: list[BaseMessage]) -> None:
        tags = self._judge(messages)
        if tags is None and not self.keep_irrelevant:
            _logger.debug("turn not stored in session %r: not relevant", self.chat_memory.session_id)
            return
        counter = self._single_counter if self.max_token_limit is not None else None
        humans = [isinstance(message, HumanMessage) for message in messages]
        if humans[0] and sum(humans) == 1:
            self._append(messages, counter=counter, tags=tags, judged_by=self._fingerprint)
        else:
            # Several turns of the log, or more of the one before: each is judged as a whole when it is loaded.
            self._append(messages, counter=counter)


def _relevant(keywords: Sequence[str]) -> Verdict:
    if not keywords:
        return Verdict("kept", "is_relevant finds its turn relevant.")
    return Verdict("kept", f"Found in its turn: {', '.join(map(repr, keywords))}.")

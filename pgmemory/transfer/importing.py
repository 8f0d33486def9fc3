"""Importing: one way for all sources, resumable, safe to run twice, never in between live turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pgmemory.errors import ConfigurationError
from pgmemory.models import ConversationKey
from pgmemory.pool import StoreError
from pgmemory.store import ConversationStore
from pgmemory.store.transfer import Entry
from pgmemory.transfer.source import Source, SourceConversation

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

_BATCH_MESSAGES = 1000
_BATCH_CHARACTERS = 8 * 1024 * 1024
_MAX_FINDINGS = 1000


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that was not imported, or not rightly.

    Attributes:
        kind: ``skipped``: cannot be read. ``conflict``: the conversation is another one here and was left alone.
            ``disagreement``: what was read back is not what was written.
        place: Where it stands in the source.
        reason: Why. Quotes no message.
    """

    kind: Literal["skipped", "conflict", "disagreement"]
    place: str
    reason: str


@dataclass(slots=True)
class ImportReport:
    """What an import has done, or, as a dry run, would do. Each message of the source is in one of the numbers.

    Attributes:
        dry_run: Whether nothing was written.
        conversations: Conversations in the source.
        messages: Messages that were stored.
        already_there: Messages that were here before.
        deleted_here: Messages that were here before and were deleted here; they stay so.
        left_out: Messages of which the store's `redact` left nothing.
        skipped: Rows and messages that cannot be read, and those of conversations without a usable name.
        in_conflicts: Messages of conversations that are others here, from the batch on that differs.
        conflicts: Conversations that are others here and were left alone, from the place on that differs.
        disagreements: Batches of which something else was read back than was written; and one if these numbers do not
            add up to the messages that the source gave.
        findings: What and why, the first thousand.
    """

    dry_run: bool = False
    conversations: int = 0
    messages: int = 0
    already_there: int = 0
    deleted_here: int = 0
    left_out: int = 0
    skipped: int = 0
    in_conflicts: int = 0
    conflicts: int = 0
    disagreements: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def succeeded(self) -> bool:
        """Whether everything that can be read is here."""
        return not self.conflicts and not self.disagreements

    @property
    def total(self) -> int:
        """How many messages are accounted for."""
        there = self.messages + self.already_there + self.deleted_here
        return there + self.left_out + self.skipped + self.in_conflicts

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def import_conversations(
    store: ConversationStore,
    source: Source,
    *,
    keep_tenants: bool = False,
    strict: bool = False,
    dry_run: bool = False,
    on_progress: Callable[[int, int | None], object] | None = None,
) -> ImportReport:
    """Import conversations.

    Each goes in in batches of about a thousand messages, each batch a transaction; so a conversation of up to that many
    is imported whole or not at all. Messages keep their place: one that is here already is not stored again, one that
    was deleted or cleared here does not come back, and a conversation that is another one here, or has gone on here
    while it was imported, is left alone and reported. So an import that broke off is run again, and one that was done
    stores only what is new. A conversation that was erased here with its row comes back: nothing is left to tell it by.
    Each batch is read back and compared.

    An exact source also brings a conversation's metadata, times, hold and time to live where the conversation is made
    here, and its summaries where it has not been cleared or edited here. Others bring the times of messages where they
    know them, and retention counts from the last one. What the store redacts is redacted, but for exact sources, each
    message by itself; it becomes one message, or none.

    Args:
        store: Where to; its schema stands.
        source: Where from.
        keep_tenants: Keep the tenants of an exact source; the store must be one without a tenant. Else everything
            becomes the store's tenant's.
        strict: Let what cannot be read be an error, not a finding.
        dry_run: Write nothing, but read and check everything.
        on_progress: Called after each batch with `Source.done` and `Source.total`.

    Raises:
        ConfigurationError: The source is not what it should be (what came before it is imported), or, with `strict`,
            something in it cannot be read.
        SchemaError: The store's schema is missing or does not fit.
        StoreError: The database refused or could not be reached; run the import again.
    """
    if keep_tenants and store.tenant_id:
        raise ConfigurationError(f"keep_tenants needs a store without a tenant; this one's is {store.tenant_id!r}")
    report = ImportReport(dry_run)
    store.require_schema()

    def find(kind: Literal["skipped", "conflict", "disagreement"], place: str, reason: str) -> None:
        if len(report.findings) < _MAX_FINDINGS:
            report.findings.append(Finding(kind, place, reason))

    def skip(place: str, reason: str) -> None:
        if strict:
            raise ConfigurationError(f"{place}: {reason}")
        report.skipped += 1
        find("skipped", place, reason)

    def said_of(messages: Sequence[BaseMessage]) -> Sequence[BaseMessage]:
        assert store.redact is not None
        rewritten = list(store.redact(messages))
        report.left_out += not rewritten
        return rewritten

    def take(conversation: SourceConversation) -> None:
        try:
            key = _key(store, conversation, keep_tenants)
        except ConfigurationError as error:
            if strict:
                raise ConfigurationError(f"{conversation.place}: {error}") from None
            nameless = sum(1 for _ in conversation.messages)
            report.skipped += nameless
            find("skipped", conversation.place, f"{error} ({nameless} messages)")
            return
        is_first = True
        remaining = _batches(conversation.messages)
        for batch, is_last in remaining:
            if not batch and conversation.state is None:
                return
            written = store.write_entries(
                key,
                batch,
                state=conversation.state,
                summaries=conversation.summaries,
                is_first=is_first,
                is_last=is_last,
                all_tenants=keep_tenants,
                dry_run=dry_run,
            )
            if written.conflict is not None:
                report.conflicts += 1
                report.in_conflicts += len(batch) + sum(len(rest) for rest, _ in remaining)
                find("conflict", conversation.place, written.conflict)
                return
            is_first = False
            report.messages += written.stored
            report.already_there += written.present
            report.deleted_here += len(batch) - written.stored - written.present
            new = batch[len(batch) - written.stored :]
            if not dry_run and (missing := store.count_differing(key, new, all_tenants=keep_tenants)):
                report.disagreements += 1
                find("disagreement", conversation.place, f"{missing} messages were read back otherwise than written")
            if on_progress is not None:
                on_progress(source.done, source.total)

    redact = None if store.redact is None else said_of
    with closing(source.conversations(skip, redact)) as conversations:
        for conversation in conversations:
            report.conversations += 1
            try:
                take(conversation)
            except StoreError as error:
                if (error.sqlstate or "").startswith(
                    "22"
                ):  # data exception: not the database's fault, but the source's
                    raise ConfigurationError(f"{conversation.place}: the database refused a value: {error}") from error
                raise
    if report.total != source.rows:
        report.disagreements += 1
        find("disagreement", "the source", f"it gave {source.rows} messages, and {report.total} are accounted for")
    return report


def _key(store: ConversationStore, conversation: SourceConversation, keep_tenants: bool) -> ConversationKey:
    key = store.key(conversation.session_id, conversation.user_id)
    if not keep_tenants or conversation.state is None:
        return key
    return ConversationKey(conversation.state.tenant_id, key.user_id, key.session_id)


def _batches(entries: Iterator[Entry]) -> Iterator[tuple[list[Entry], bool]]:
    """Yield messages in batches, each with whether it is the last one; without messages one empty batch."""
    batch: list[Entry] = []
    characters = 0
    for entry in entries:
        if len(batch) == _BATCH_MESSAGES or characters >= _BATCH_CHARACTERS:
            yield batch, False
            batch, characters = [], 0
        batch.append(entry)
        message = entry.message
        characters += len(message.content) + len(message.additional_kwargs or "") + len(message.extra or "")
    yield batch, True

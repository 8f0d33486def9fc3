"""The command that counts: stats."""

from __future__ import annotations

from dataclasses import asdict

import click

from pgmemory.cli.app import json_option, main, print_json, with_store
from pgmemory.cli.look import print_conversations
from pgmemory.cli.printing import can_print, new_table, print_line, print_rich, size, while_read
from pgmemory.findings import DayOfGrowth, Statistics, TableSize
from pgmemory.store import ConversationStore

_BAR_COLUMNS = 40


@main.command()
@click.option("--all-tenants", is_flag=True, help="Count what belongs to any tenant.")
@click.option("--days", type=click.IntRange(1, 366), default=14, show_default=True, help="Days of growth to show.")
@click.option("--biggest", type=click.IntRange(min=0), default=5, show_default=True, help="Conversations to show.")
@json_option
@with_store
@while_read
def stats(store: ConversationStore, all_tenants: bool, days: int, biggest: int, as_json: bool) -> None:
    """Count conversations, messages and tokens; show growth by day, the biggest conversations, and sizes on disk.

    Reads the whole store once or twice: with millions of messages that takes a while.

    \b
    Examples:
      pgmemory stats
      pgmemory stats --all-tenants --days 30 --json
    """
    counted = store.statistics(all_tenants=all_tenants, days=days)
    largest = store.list_conversations(all_tenants=all_tenants, sort="size", limit=biggest) if biggest else []
    version = max(store.schema_status().applied, default=0)
    if as_json:
        print_json(asdict(counted) | {"biggest": [asdict(record) for record in largest], "schema_version": version})
        return
    _print_counts(counted, version)
    _print_growth(counted.days)
    if largest:
        print_line("\nbiggest conversations")
        print_conversations(largest, with_tenants=all_tenants)
    _print_tables(counted.tables)


def _print_counts(counted: Statistics, version: int) -> None:
    uncounted = f" ({counted.uncounted_messages:,} messages not counted)" if counted.uncounted_messages else ""
    lines = {
        "conversations": f"{counted.conversations:,}",
        "users": f"{counted.users:,}",
        "messages": f"{counted.messages:,}",
        "turns": f"{counted.turns:,}",
        "tokens": f"{counted.tokens:,}{uncounted}",
        "held": f"{counted.held:,}",
        "expired": f"{counted.expired:,}",
        "encrypted": f"{counted.encrypted:,}",
        "schema version": str(version),
    }
    for name, value in lines.items():
        print_line(f"{name:<16}{value}")


def _print_growth(days: tuple[DayOfGrowth, ...]) -> None:
    most = max(day.messages for day in days)
    mark = "█" if can_print("█") else "#"
    table = new_table()
    table.add_column("day (UTC)", no_wrap=True)
    table.add_column("messages", justify="right", no_wrap=True)
    table.add_column(" " * _BAR_COLUMNS, no_wrap=True)
    table.add_column("new conversations", justify="right")
    for day in days:
        bar = mark * -(-day.messages * _BAR_COLUMNS // (most or 1))  # rounded up: a single message is seen
        table.add_row(day.day.isoformat(), f"{day.messages:,}", bar, f"{day.conversations:,}")
    print_line("\ngrowth by day")
    print_rich(table)


def _print_tables(tables: tuple[TableSize, ...]) -> None:
    from rich.text import Text

    table = new_table()
    table.add_column("table", overflow="fold")
    for name in ("rows", "indexes", "together"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in tables:
        both = each.table_bytes + each.index_bytes
        table.add_row(Text(each.name), size(each.table_bytes), size(each.index_bytes), size(both))
    print_line("\non disk, all tenants together")
    print_rich(table)

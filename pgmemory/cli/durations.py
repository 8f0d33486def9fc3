"""Durations as people write them: ``45s``, ``90m``, ``12h``, ``30d``, ``2w``."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import click

_SECONDS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"([0-9]{1,12})([smhdw])")
_LONGEST = timedelta(days=36_500)  # so that the time it leads back to exists, for PostgreSQL and Python


class Duration(click.ParamType):  # type: ignore[type-arg]  # generic in newer clicks
    """A number and a unit, from a second to a hundred years, as a timedelta."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> timedelta:
        """Return the duration that the text says; wrong usage where it says none."""
        if isinstance(value, timedelta):
            return value
        if found := _DURATION.fullmatch(value):
            count, unit = found.groups()
            seconds = int(count) * _SECONDS[unit]
            if seconds > _LONGEST.total_seconds():
                self.fail(f"{value!r} is longer than {_LONGEST.days}d", param, ctx)
            if seconds:
                return timedelta(seconds=seconds)
        self.fail(f"{value!r} is no duration: give a number above 0 and s, m, h, d or w, as in 30d", param, ctx)

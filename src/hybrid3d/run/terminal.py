"""Consoles that print what a user wrote as it stands: no markup, no emoji codes, and no control characters."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from hybrid3d.errors import visible


class _PlainConsole(Console):
    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*(visible(each) if isinstance(each, str) else each for each in objects), **options)


def console(**options: Any) -> Console:
    """A console of `rich`, with these options of its own."""
    return _PlainConsole(**options, emoji=False, markup=False, highlight=False)

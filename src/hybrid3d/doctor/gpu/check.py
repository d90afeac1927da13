"""What a check is, and what it records while it runs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO


class CheckFailed(AssertionError):
    """Raised by a check whose measurement is not as expected; the message has both values."""


class CheckSkipped(RuntimeError):
    """Raised by a check that finds out while running that it cannot be done here; the message says why."""


@dataclass(frozen=True)
class Check:
    """One check of the table.

    Attributes:
        name: by which `--only` selects it.
        about: what it checks, in a few words.
        function: `module:function`. It is called as `function(record, **arguments)`.
        seconds: its time limit.
        needs: what must be present, as the names in `machine.NEEDS`.
        arguments: JSON values.
        environment: variables of its process; None unsets one.
    """

    name: str
    about: str
    function: str
    seconds: float
    needs: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str | None] = field(default_factory=dict)


class CheckLog:
    """The numbers of a check. Each is written when it is measured, so that those before a time limit are kept."""

    def __init__(self, file: TextIO):
        self._file = file

    def __call__(self, **numbers: Any) -> None:
        self._write({"numbers": numbers})

    def end(self, status: str, reason: str | None = None) -> None:
        """Write how the check ended: `passed`, `failed` or `skipped`."""
        self._write({"status": status, "reason": reason})

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()


def expect(condition: object, message: str) -> None:
    """Raise `CheckFailed` with the message unless the condition is true."""
    if not condition:
        raise CheckFailed(message)

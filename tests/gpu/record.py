"""What a check measures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Record:
    """The numbers of a check. Each is written when it is measured, so that those before a time limit are kept."""

    def __init__(self, path: Path):
        self._path = path

    def __call__(self, **numbers: Any) -> None:
        self._write({"numbers": numbers})

    def end(self, status: str, reason: str = "") -> None:
        """Write how the check ended: `passed`, `failed` or `skipped`."""
        self._write({"status": status} | ({"reason": reason} if reason else {}))

    def read(self) -> dict[str, Any]:
        """Return what was written: `numbers`, and if the check has ended its `status`."""
        found: dict[str, Any] = {"numbers": {}}
        for line in self._path.read_text(encoding="utf-8").splitlines():
            if line.endswith("}"):  # otherwise it was killed meanwhile
                entry = json.loads(line)
                found["numbers"] |= entry.pop("numbers", {})
                found |= entry
        return found

    def _write(self, entry: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

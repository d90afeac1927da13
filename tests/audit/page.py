"""The page at the end of the audit: what was proven, against which versions, in which time."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping
from typing import Any

from audit.faults import FAULTS

MAX_LENGTH = 300  # characters of a difference


def difference(found: Any, expected: Any) -> str:
    """Return in words how an answer differs from the expected one; nothing where they are equal."""
    if found == expected:
        return ""
    if isinstance(found, dict) and isinstance(expected, dict):
        keys = [key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key)]
        text = "; ".join(f"{key}: {difference(found.get(key), expected.get(key))}" for key in sorted(keys))
    elif isinstance(found, list) and isinstance(expected, list):
        more, less = ([one for one in a if one not in b] for a, b in ((found, expected), (expected, found)))
        parts = [f"{one}" for one in more[:2]] + [f"lacks {one}" for one in less[:2]]
        text = "; ".join([*parts, *([f"{len(more) + len(less)} in all"] if len(more) + len(less) > len(parts) else [])])
    else:
        text = f"{found}, expected {expected}"
    return text[:MAX_LENGTH] or "another order"


def page(
    environment: Any,
    checks: Iterable[Any],
    facts: Iterable[Any],
    faults: Mapping[str, Any],
    seconds: Mapping[str, float],
    total: float,
) -> str:
    """Return the page in Markdown."""
    by_check: dict[str, list[Any]] = {}
    for fact in facts:
        by_check.setdefault(fact.check, []).append(fact)
    wrong = [fact for found in by_check.values() for fact in found if not fact.proven]
    lines = [
        "# The CUDA audit",
        "",
        f"`make audit-cuda`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} CPU cores ({platform.machine()}), no GPU; "
        f"{total:.0f} s; installing took {environment.install_seconds:.0f} s, once.",
        "",
        "Against " + ", ".join(f"{name} {version}" for name, version in environment.versions().items()) + ".",
        "A faked H100 (sm_90) or B200 (sm_100). Stand-ins: Transformer Engine's compiled extension, how FlashInfer and "
        "DeepGEMM lay scales out, and what latent attention has dequantized. No kernel has run.",
        "",
        "| check | proves | facts | proven | seconds |",
        "|---|---|---|---|---|",
    ]
    for check in checks:
        found = by_check.get(check.name, [])
        proven = sum(fact.proven for fact in found)
        lines.append(f"| {check.name} | {check.proves} | {len(found)} | {proven} | {seconds[check.name]:.0f} |")
    lines += ["", "## Not proven", "", *(f"- {fact.check}: {fact.subject}: {fact.found}" for fact in wrong)]
    lines += [] if wrong else ["Nothing."]
    lines += ["", "## Faults put in on purpose", "", "| fault | found | first by |", "|---|---|---|"]
    for name, fact in faults.items():
        lines.append(f"| {FAULTS[name].what} | {'yes' if fact.proven else '**no**'} | {fact.subject} |")
    return "\n".join(lines) + "\n"

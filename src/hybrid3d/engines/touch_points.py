"""The check of engines' sources that comes before any engine is built: what is refused, and what is warned of."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid3d.engines.certificates import EditedCertificate, standing_of_installed
from hybrid3d.engines.compare import Report, compare, digest_of, known_versions
from hybrid3d.engines.installed import Copy, copies_in, installed_copies
from hybrid3d.engines.uses import read_uses
from hybrid3d.errors import UserMistake


def compare_installed() -> list[Report]:
    """Compare the engines that Python would import with what hybrid3d uses of them; without those not installed."""
    return _compare(installed_copies())


def compare_places(places: Iterable[Path]) -> list[Report]:
    """Compare the engines in folders and wheels.

    Raises:
        UserMistake: one of them has none.
    """
    return _compare([copy for place in places for copy in copies_in(place)])


def _compare(copies: list[Copy]) -> list[Report]:
    with without_collections():
        uses = read_uses() if copies else None
        return [compare(copy, uses) for copy in copies if uses is not None]


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage while files are parsed, of which nothing is: it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_installed() -> list[str]:
    """Return what to warn of before the installed engines are used.

    Raises:
        UserMistake: hybrid3d does not work with one of them; the message names what is missing.
    """
    reports = compare_installed()
    refused = [refusal(report) for report in reports if report.refused]
    if refused:
        raise UserMistake("\n".join(refused))
    try:
        standing = standing_of_installed(digests(reports))
        known = [] if standing.status in ("certified", "tried") else [standing.text]
    except EditedCertificate as edited:  # nothing that a run needs
        known = [str(edited)]
    return [*(text for report in reports for text in (*report.copy.warnings, *warning(report))), *known]


def digests(reports: Iterable[Report]) -> dict[str, str]:
    """Return digests of what hybrid3d uses of each engine."""
    return {report.copy.engine.name: digest_of(report.touched) for report in reports}


def refusal(report: Report) -> str:
    """Return why hybrid3d does not work with an engine, and what to do."""
    copy, count = report.copy, len(report.refused)
    return "\n".join(
        [
            f"hybrid3d cannot use {copy} in {copy.place}, because of {count} difference{'s' if count > 1 else ''}:",
            *(f"  {finding.problem}: {finding}" for finding in report.refused),
            *copy.warnings,
            f"install a version that hybrid3d knows: {copy.distribution} {join_or(known_versions(copy.engine))}",
        ]
    )


def warning(report: Report) -> list[str]:
    """Return what to say of an engine that works as far as reading can tell, but differs; nothing if it does not."""
    if not report.warned:
        return []
    names = ", ".join(dict.fromkeys(finding.name for finding in report.warned))
    return [
        f"{described(report)}. Nothing is missing, but {len(report.warned)} things have changed in functions that "
        f"hybrid3d replaces or overrides: {names}. Before you train, prove that it still works: hybrid3d certify MODEL"
    ]


def described(report: Report) -> str:
    """Return which versions were compared."""
    if report.is_known:
        return f"{report.copy} is not as in hybrid3d's record of that version"
    known = ", ".join(known_versions(report.copy.engine))
    compared = f", so it was compared with {report.baseline}" if report.baseline else ""
    return f"{report.copy} is none of the versions that hybrid3d knows ({known or 'none'}){compared}"


def join_or(words: list[str]) -> str:
    """Return words as a list that ends with `or`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

"""`hybrid3d certify --touch-points`: compare engines' sources with what hybrid3d uses; and the check at start."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hybrid3d import launch_environment
from hybrid3d.cli.terminal import DONE, FAILED, make_console, path_argument
from hybrid3d.engines.compare import (
    REFUSED,
    Report,
    check_installed,
    compare_installed,
    compare_places,
    digest_of,
    write_record,
)
from hybrid3d.errors import UserMistake
from hybrid3d.launch_environment import CHECKED


def check_engines() -> list[str]:
    """Check the installed engines' sources before ranks start, once on each node; return what to warn of.

    Raises:
        UserMistake: hybrid3d does not work with one of them.
    """
    if CHECKED in os.environ or (launch_environment.under_launcher() and launch_environment.local_rank() != 0):
        return []
    return check_installed()


def print_warnings(texts: Iterable[str]) -> None:
    """Print what to warn of to stderr: after all checks, so that a mistake is told alone."""
    for text in texts:
        make_console(stderr=True).print(text, style="yellow", highlight=False, markup=False, soft_wrap=True)


def run(places: list[str], as_json: bool, record: bool) -> int:
    """Compare the engines in these folders and wheels, or the installed ones; return the exit code.

    Raises:
        UserMistake: there is no engine.
    """
    paths = [path_argument(place, "--touch-points") for place in places]
    reports = compare_places(paths) if paths else compare_installed()
    if not paths and all(report.copy.engine.package == "torch" for report in reports):
        raise UserMistake("neither megatron-core nor vllm is installed: name a folder or a wheel that has one")
    written = [str(write_record(report.touched)) for report in reports if record and not report.refused]
    if as_json:
        print(json.dumps(_summary(reports, written), indent=2))
    else:
        console = make_console()
        for line in (*(line for report in reports for line in _lines(report)), *written):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    return FAILED if any(report.refused for report in reports) else DONE


def _lines(report: Report) -> list[str]:
    """Return a report as lines: one for the engine, and one for each finding."""
    compared = f"compared with the record of {report.baseline}" if report.baseline else "there is no record of it"
    counts = [(sum(one.problem == kind for one in report.findings), kind) for kind in dict.fromkeys(_kinds(report))]
    found = ", ".join(f"{count} {kind}" for count, kind in counts) or "no difference"
    lines = [f"{report.copy} in {report.copy.place}: {report.names} names, {compared}: {found}"]
    lines += [f"  {text}" for text in (*report.copy.warnings, report.copy.note) if text]
    lines += [f"  cannot be read: {file}: {why}" for file, why in report.copy.tree.unreadable.items()]
    return [*lines, *(f"  {finding.problem}: {finding}" for finding in report.findings)]


def _kinds(report: Report) -> list[str]:
    return [finding.problem for finding in report.findings]


def _summary(reports: list[Report], written: list[str]) -> dict[str, Any]:
    """Return the reports as JSON: `missing` and `changed` of all, and `engines` with each."""
    findings = [finding for report in reports for finding in report.findings]
    return {
        "missing": [finding.name for finding in findings if finding.problem in REFUSED],
        "changed": [finding.name for finding in findings if finding.problem not in REFUSED],
        "engines": [
            {
                "distribution": report.copy.distribution,
                "version": report.copy.version,
                "place": str(report.copy.place),
                "warnings": [text for text in (*report.copy.warnings, report.copy.note) if text],
                "unreadable": report.copy.tree.unreadable,
                "names": report.names,
                "baseline": report.baseline,
                "known": report.is_known,
                "digest": digest_of(report.touched),
                "findings": [asdict(finding) for finding in report.findings],
            }
            for report in reports
        ],
        "records": written,
    }

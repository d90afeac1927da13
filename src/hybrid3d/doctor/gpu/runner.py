"""Runs checks, each as a process with its own time limit, and prints a JSON line for each as it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from hybrid3d.doctor.gpu.check import Check
from hybrid3d.doctor.gpu.machine import Machine, in_subprocess
from hybrid3d.process import kill_descendants_on_exit

TOTAL_SECONDS = 1200.0
TIMES_AS_LONG = {"cuda": 1, "cpu": 3}  # the limits, on a machine that may do other work, too
PROBE_SECONDS = 120.0
OUTPUT_LINES = 20  # of a failed check's output, in its result
SOURCES = Path(__file__).resolve().parents[3]
# Of a process that is a rank: a check is none, and starts its own ranks if it needs them
RANK_VARIABLES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "HYBRID3D_")


class Interrupted(BaseException):
    """Raised by a signal that ends the run: what is done is still reported."""


def run_checks(
    checks: Sequence[Check], device: str, out: Path | None = None, total_seconds: float = TOTAL_SECONDS
) -> int:
    """Run checks in their order and print their results; the last line is one JSON object with all of them.

    Args:
        device: `cuda` or `cpu`; on `cpu`, checks that do not need CUDA run on the CPU.
        out: a file that gets the same object, written anew after each check.
        total_seconds: the limit of all checks together; three times as much on `cpu`, as for each check.

    Returns:
        The exit code: 0 if no check failed, else 1.
    """
    started, longer = time.monotonic(), TIMES_AS_LONG[device]
    total_seconds *= longer
    environment = _environment(device)
    machine = in_subprocess(environment, PROBE_SECONDS)
    report: dict[str, Any] = {"device": device, "machine": asdict(machine), "checks": []}
    _print({"machine": report["machine"]})
    results: list[dict[str, Any]] = report["checks"]
    stopped: str | None = None
    for check in checks:
        left = total_seconds - (time.monotonic() - started)
        reason = _reason_to_skip(check, machine, device, left, total_seconds) or stopped
        result: dict[str, Any] = {"check": check.name, "status": "skipped", "reason": reason}
        if reason is None:
            try:
                with _signals_raise():
                    result = run_check(check, device, environment, min(check.seconds * longer, left))
            except Interrupted as signalled:
                stopped = f"not run: the run was ended by {signalled}"
                result = {"check": check.name, "status": "failed", "reason": f"ended by {signalled}"}
        results.append(result)
        _print(result)
        counts = Counter(one["status"] for one in results)
        report |= {status: counts[status] for status in ("passed", "failed", "skipped")}
        report["seconds"] = round(time.monotonic() - started, 1)
        if out is not None:
            out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"{report.get('passed', 0)} passed, {report.get('failed', 0)} failed, {report.get('skipped', 0)} skipped")
    _print(report)
    return 1 if report.get("failed") else 0


def _reason_to_skip(check: Check, machine: Machine, device: str, left: float, total: float) -> str | None:
    if device == "cpu":
        needs = [need for need in check.needs if need != "2 gpus"]  # two ranks run on one CPU
    else:
        needs = ["cuda", *(need for need in check.needs if need != "cuda")]
    missing = machine.missing(needs)
    if missing is None and left <= 0:
        return f"not run: the time limit of all checks, {total:g} s, was reached"
    return missing


def run_check(check: Check, device: str, environment: Mapping[str, str], seconds: float) -> dict[str, Any]:
    """Run one check in a process, which is killed with all that it started after `seconds`.

    Returns:
        The result: name, status, seconds, the numbers that it recorded, and for a failure the reason and the end of
        the output.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hybrid3d-doctor-") as folder, kill_descendants_on_exit():
        record, log = Path(folder) / "record.jsonl", Path(folder) / "output.log"
        work = Path(folder) / "work"
        work.mkdir()
        record.touch()
        arguments = json.dumps({**check.arguments, "device": device})
        command = [sys.executable, "-m", "hybrid3d.doctor.gpu.child", check.function, arguments, str(record)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=work,
                env=_changed(environment, check.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
        entries = [json.loads(line) for line in record.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
        tail = log.read_text(errors="replace", encoding="utf-8").splitlines()[-OUTPUT_LINES:]
    numbers: dict[str, Any] = {}
    for entry in entries:
        numbers |= entry.get("numbers", {})
    ended = next((entry for entry in entries if "status" in entry), None)
    result: dict[str, Any] = {"check": check.name, "seconds": round(time.monotonic() - began, 1), "numbers": numbers}
    if ended is not None:
        result |= {"status": ended["status"]} | ({"reason": ended["reason"]} if ended["reason"] else {})
    else:
        reason = f"still running after {seconds:g} s" if code is None else f"ended with exit code {code}"
        result |= {"status": "failed", "reason": reason}
    if result["status"] == "failed":
        result["output"] = tail
    return result


def _environment(device: str) -> dict[str, str]:
    """Return the environment of the processes: these sources, no rank's variables, nothing downloaded."""
    found = {key: value for key, value in os.environ.items() if not key.startswith(RANK_VARIABLES)}
    path = [str(SOURCES), *filter(None, [found.get("PYTHONPATH")])]
    found |= {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if device == "cpu":
        found["CUDA_VISIBLE_DEVICES"] = ""
    return found


def _changed(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    both = {**environment, **changes}
    return {key: value for key, value in both.items() if value is not None}


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Within the context SIGINT and SIGTERM raise `Interrupted`, so that the check's processes are killed."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(signal.Signals(number).name)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print(entry: Mapping[str, Any]) -> None:
    print(json.dumps(entry), flush=True)

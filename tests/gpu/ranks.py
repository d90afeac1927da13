"""Runs a part of a check as several ranks, as torchrun does."""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from hybrid3d.errors import set_stream_errors
from hybrid3d.launch.local_ranks import run_ranks
from hybrid3d.launch_environment import RUN
from hybrid3d.process import shared_memory_cleanup


def run_on_ranks(count: int, function: str, **arguments: Any) -> dict[str, Any]:
    """Call `module:function` with the arguments on each rank; return what it returns on rank 0.

    Raises:
        AssertionError: it failed on a rank; the message is that of the rank that failed first.
    """
    run = f"gpu-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder, shared_memory_cleanup(run):
        command = [sys.executable, "-m", "gpu.ranks", function, json.dumps(arguments), folder]
        variables = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), RUN: run}
        with mock.patch.dict(os.environ, variables):
            failed = run_ranks(command, count)
        failures = sorted(Path(folder).glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError(
                f"rank {failures[0].name.removeprefix('failed-')}: {failures[0].read_text(encoding='utf-8')}"
            )
        if failed:
            rank, code = next(iter(failed.items()))
            raise AssertionError(f"rank {rank} of {count} ended with exit code {code}")
        answer: dict[str, Any] = json.loads((Path(folder) / "answer").read_text(encoding="utf-8"))
        return answer


def main(function: str, arguments: str, folder: str) -> None:
    """Run as one of the ranks."""
    module, _, name = function.partition(":")
    rank = os.environ["RANK"]
    try:
        answer: Mapping[str, Any] = getattr(importlib.import_module(module), name)(**json.loads(arguments))
        if rank == "0":
            (Path(folder) / "answer").write_text(json.dumps(answer), encoding="utf-8")
    except BaseException as error:  # the boundary of the process
        traceback.print_exc()
        said = str(error) if isinstance(error, AssertionError) else f"{type(error).__name__}: {error}"
        (Path(folder) / f"failed-{rank}").write_text((said.splitlines() or [""])[0], encoding="utf-8")
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # vLLM has destroyed the default group, and its threads may wait for others


if __name__ == "__main__":
    set_stream_errors()
    main(*sys.argv[1:])

"""Queries the engines in a separate process, because vLLM keeps global state of models that were only queried."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from hybrid3d.config import Recipe, recipe_to_yaml
from hybrid3d.errors import UserMistake

ENGINE_QUERY_TIMEOUT = timedelta(hours=1)  # the largest models take a minute, imports from a cold file system many
_RANK_VARIABLES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


class EngineQueryFailed(UserMistake):
    """Raised if the process failed; the message is its last line of output, or how it exited."""


def start_subprocess(
    module: str, recipe: Recipe, folder: Path, stdout: int | TextIO, stderr: int
) -> tuple[subprocess.Popen[str], Path]:
    """Start `python -m MODULE RECIPE.yaml ANSWER`; return the process, and the file ANSWER that it will write.

    Args:
        folder: for both files.
        stdout, stderr: as for `subprocess.Popen`.
    """
    recipe_file, answer = folder / "recipe.yaml", folder / "answer.json"
    recipe_file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_RANK_VARIABLES)}
    environment["PYTHONIOENCODING"] = "utf-8:backslashreplace"
    command = [sys.executable, "-m", module, str(recipe_file), str(answer)]
    process = subprocess.Popen(
        command, env=environment, stdout=stdout, stderr=stderr, text=True, encoding="utf-8", errors="replace"
    )
    return process, answer


def run_in_subprocess(module: str, recipe: Recipe) -> str:
    """Run `python -m MODULE RECIPE.yaml ANSWER` and return the content of the file ANSWER that it writes.

    Raises:
        EngineQueryFailed: the process failed or timed out.
    """
    with tempfile.TemporaryDirectory() as folder:
        process, answer = start_subprocess(module, recipe, Path(folder), sys.stderr, subprocess.PIPE)
        with process:
            try:
                _, stderr = process.communicate(timeout=ENGINE_QUERY_TIMEOUT.total_seconds())
            except BaseException as error:
                process.kill()
                if isinstance(error, subprocess.TimeoutExpired):
                    raise EngineQueryFailed(f"no answer within {ENGINE_QUERY_TIMEOUT}") from None
                raise
        sys.stderr.write(stderr)
        if process.returncode:
            last = stderr.strip().splitlines()[-1:]
            reason = "".join(last) if process.returncode > 0 else f"killed by signal {-process.returncode}"
            raise EngineQueryFailed(reason)
        return answer.read_text(encoding="utf-8")

"""Queries the engines in a separate process, because vLLM keeps global state of models that were only queried."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from hybrid3d.config import Recipe, recipe_to_yaml
from hybrid3d.errors import UserMistake

ENGINE_QUERY_TIMEOUT = timedelta(hours=1)  # the largest models take a minute, imports from a cold file system many
_RANK_VARIABLES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


class EngineQueryFailed(UserMistake):
    """Raised if the process failed; the message is its last line of output, or how it exited."""


def run_in_subprocess(module: str, recipe: Recipe) -> str:
    """Run `python -m MODULE RECIPE.yaml ANSWER` and return the content of the file ANSWER that it writes.

    Raises:
        EngineQueryFailed: the process failed or timed out.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe_file, answer = Path(folder) / "recipe.yaml", Path(folder) / "answer.json"
        recipe_file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_RANK_VARIABLES)}
        environment["PYTHONIOENCODING"] = "utf-8:backslashreplace"
        command = [sys.executable, "-m", module, str(recipe_file), str(answer)]
        try:
            done = subprocess.run(
                command,
                env=environment,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                text=True,
                timeout=ENGINE_QUERY_TIMEOUT.total_seconds(),
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired:
            raise EngineQueryFailed(f"no answer within {ENGINE_QUERY_TIMEOUT}") from None
        sys.stderr.write(done.stderr)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise EngineQueryFailed("".join(last) if done.returncode > 0 else f"killed by signal {-done.returncode}")
        return answer.read_text(encoding="utf-8")

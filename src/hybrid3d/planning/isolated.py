"""Ask the engines in a process of its own: vLLM keeps parts of models that were only asked for those that then run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

from hybrid3d.config import Recipe, recipe_to_yaml
from hybrid3d.errors import UserMistake

ENGINE_QUERY_TIMEOUT = timedelta(minutes=10)  # the largest models take a minute
_OF_A_RANK = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


class EngineQueryFailed(UserMistake):
    """The process that asked has no answer: its last words, or how it ended."""


def run_in_subprocess(module: str, recipe: Recipe) -> str:
    """What `python -m MODULE RECIPE.yaml ANSWER` writes into its answer.

    Raises:
        EngineQueryFailed: it ended without one.
    """
    with tempfile.TemporaryDirectory() as folder:
        said, answer = Path(folder) / "recipe.yaml", Path(folder) / "answer.json"
        said.write_text(recipe_to_yaml(recipe))
        alone = {key: value for key, value in os.environ.items() if not key.startswith(_OF_A_RANK)}
        command = [sys.executable, "-m", module, str(said), str(answer)]
        try:
            done = subprocess.run(
                command,
                env=alone,
                stdout=sys.stderr,
                stderr=subprocess.PIPE,
                text=True,
                timeout=ENGINE_QUERY_TIMEOUT.total_seconds(),
            )
        except subprocess.TimeoutExpired:
            raise EngineQueryFailed(f"no answer within {ENGINE_QUERY_TIMEOUT}") from None
        sys.stderr.write(done.stderr)
        if done.returncode:
            last = done.stderr.strip().splitlines()[-1:]
            raise EngineQueryFailed("".join(last) if done.returncode > 0 else f"killed by signal {-done.returncode}")
        return answer.read_text()

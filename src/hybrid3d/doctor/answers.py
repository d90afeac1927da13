"""Questions that need torch or an engine, answered in a process of its own, which may crash or hang.

`python -m hybrid3d.doctor.answers OUT QUESTION,... [RECIPE]` writes a line of JSON for each question to OUT
as it is answered, so that those before a crash are kept.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe, check_layout_early, load_recipe, recipe_to_yaml
from hybrid3d.errors import UserMistake, set_stream_errors
from hybrid3d.launch_environment import under_launcher
from hybrid3d.process import kill_descendants_on_exit

SECONDS = 180.0  # both engines, and a model's and its data's checks, on a slow file system
SOURCES = Path(__file__).resolve().parents[2]

Answers = dict[str, dict[str, Any]]
"""By question, `answer`, or the `error` that it led to."""


def ask(recipe: Recipe | None, asked: Collection[str], seconds: float = SECONDS) -> Answers:
    """Return what could be answered within the seconds; for other questions an `error` that says why not.

    Args:
        asked: which of `questions`.
    """
    with tempfile.TemporaryDirectory(prefix="hybrid3d-doctor-") as folder, kill_descendants_on_exit():
        out, recipe_file, log = (Path(folder) / name for name in ("answers.jsonl", "recipe.yaml", "log"))
        command = [sys.executable, "-m", "hybrid3d.doctor.answers", str(out), ",".join(asked)]
        if recipe is not None:
            recipe_file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
            command.append(str(recipe_file))
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(SOURCES)])
        variables = os.environ | {"PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(seconds)
                why = f"the process that asks ended with exit code {code}"
            except subprocess.TimeoutExpired:
                code, why = None, f"no answer within {seconds:g} s"
        if code:
            last = (log.read_text(errors="replace", encoding="utf-8").strip().splitlines() or ["no output"])[-1]
            why = f"{why}: {last}"
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
    found: Answers = {}
    for line in lines:
        found |= json.loads(line)
    return {question: {"error": why} for question in questions(recipe) if question in asked} | found


def questions(recipe: Recipe | None) -> Mapping[str, Callable[[], Any]]:
    """Return the questions in their order: first those that need least."""
    asked: dict[str, Callable[[], Any]] = {"machine": _machine, "nccl": _nccl, "kernels": _kernels}
    if recipe is not None:
        asked |= {"devices": lambda: _devices(recipe), "needs": lambda: _needs(recipe)}
        asked["preflight"] = lambda: _preflight(recipe)
    return asked


def _machine() -> dict[str, Any]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    devices = map(torch.cuda.get_device_properties, range(count))
    gpus = [{"name": device.name, "bytes": device.total_memory} for device in devices]
    error = ""
    if torch.version.cuda is not None and not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as problem:
            error = str(problem).splitlines()[0]
    return {"gpus": gpus, "cuda": str(torch.version.cuda), "cuda_error": error}


def _nccl() -> str | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))


def _kernels() -> str:
    from hybrid3d.train.megatron.runtime import in_use

    return in_use()


def _devices(recipe: Recipe) -> str:
    """Return why this machine has not what the ranks need; empty if it has."""
    from hybrid3d.launch.launcher import check_devices, check_node

    try:
        check_node(recipe) if under_launcher() else check_devices(recipe)
    except UserMistake as mistake:
        return str(mistake)
    return ""


def _needs(recipe: Recipe) -> dict[str, float]:
    """Return bytes that a run needs: of memory for a rank, and of the disk for a checkpoint (0 if not known)."""
    from hybrid3d.launch.launcher import rank_bytes
    from hybrid3d.reshard.plan.layout import ITEMSIZE
    from hybrid3d.train.megatron.checkpoint import OPTIMIZER_BYTES

    try:
        elements = _trained_elements(recipe)
    except UserMistake:  # which the preflight checks report
        elements = 0
    checkpoint = elements * (ITEMSIZE[recipe.model.dtype] + OPTIMIZER_BYTES)
    return {"rank_bytes": rank_bytes(recipe), "checkpoint_bytes": checkpoint}


def _trained_elements(recipe: Recipe) -> int:
    """Return the elements that a checkpoint has: of the policy, or of its adapters alone, and of a critic."""
    from hybrid3d.inputs.adapters import adapted_shapes, model_shapes
    from hybrid3d.inputs.models import read_config
    from hybrid3d.reshard.file_index import read_shapes

    path = recipe.model.path
    whole = policy = sum(map(math.prod, read_shapes(path).values()))
    if recipe.lora is not None:
        matrices = adapted_shapes(recipe.lora, model_shapes(path, read_config(path)))
        policy = sum(map(math.prod, matrices.values()))
    return policy + whole * recipe.algorithm.uses_critic


def _preflight(recipe: Recipe) -> list[str]:
    """Return the message of each check before a start that fails."""
    from hybrid3d.launch.preflight import find_mistakes
    from hybrid3d.run.live_settings import check_schedule

    found = []
    for check in (check_layout_early, check_schedule):
        try:
            check(recipe)
        except UserMistake as mistake:
            found.append(str(mistake))
    return list(dict.fromkeys([*found, *map(str, find_mistakes(recipe))]))


def main(out: str, asked: str, recipe_file: str | None = None) -> None:
    recipe = None if recipe_file is None else load_recipe(recipe_file)
    with Path(out).open("a", encoding="utf-8") as file:
        for question, answer in questions(recipe).items():
            if question not in asked.split(","):
                continue
            try:
                said: dict[str, Any] = {"answer": answer()}
            except Exception as error:  # the boundary of the process: whatever an import raises is an answer
                lines = str(error).strip().splitlines() or [""]
                said = {"error": f"{type(error).__name__}: {lines[0]}"}
            file.write(json.dumps({question: said}) + "\n")
            file.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # engines leave threads


if __name__ == "__main__":
    set_stream_errors()
    main(*sys.argv[1:])

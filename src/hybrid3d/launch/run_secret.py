"""The secret of a run, which its processes prove to know before one reads what another one sends.

It is a file that only its owner can read, in the folder of the run's logs, which all nodes see. It never passes through
the rendezvous store, which answers whoever asks; its digest does, so that no rank uses an older file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import time
from pathlib import Path

from torch.distributed.distributed_c10d import Store

from hybrid3d.config import Recipe
from hybrid3d.generation.agents.program import KEY_VARIABLE
from hybrid3d.launch.rendezvous import RendezvousError
from hybrid3d.launch_environment import CLOSE_SECONDS, derived_key, secret, set_secret
from hybrid3d.ledger import share
from hybrid3d.run.folder import RunFolder

logger = logging.getLogger(__name__)

SECRET_BYTES = 32
POLL_SECONDS = 0.5


class SecretError(RendezvousError):
    """The run's secret cannot be written or read, or others can read it."""


def write_secret(folder: RunFolder) -> None:
    """Write a new secret; rank 0 does, before the ranks meet. If it cannot be written, `SecretError` is raised."""
    _write(_path(folder), secrets.token_bytes(SECRET_BYTES).hex())


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.unlink(missing_ok=True)
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(text)
        draft.replace(path)
    except OSError as error:
        problem = f"{path}, which others must not read, could not be written ({error.strerror})"
        raise SecretError(problem, 1) from error


def adopt_secret(recipe: Recipe, folder: RunFolder, store: Store, rank: int) -> None:
    """Read the secret on every rank, after the ranks have met; write the agents' key on rank 0, if it is needed.

    Raises:
        SecretError: it is not that of rank 0, or others can read it and roles or agents prove who they are with it.
    """
    path, agents = _path(folder), None if recipe.rollout is None else recipe.rollout.agents
    is_proof = recipe.has_workers or agents is not None
    if rank == 0:
        set_secret(_read(path, is_proof))
    wanted = share(store, rank, "secret's digest", lambda: hashlib.sha256(secret()).hexdigest())
    if rank == 0:
        if agents is not None and agents.command is None and not os.environ.get(KEY_VARIABLE):
            # For agents that the user starts; a run's own have it in their environment
            _write(folder.logs / "agents-key", derived_key("agents"))
        return
    end = time.monotonic() + CLOSE_SECONDS  # some file systems are slow
    while True:
        try:
            found = _read(path, is_proof)
            problem = "is not the file that rank 0 has written"
        except OSError as error:  # not there yet; NFS says ESTALE of a file that was just replaced
            found, problem = b"", f"cannot be read ({error.strerror})"
        if hashlib.sha256(found).hexdigest() == wanted:
            set_secret(found)
            return
        if time.monotonic() > end:
            raise SecretError(f"{path} {problem}: do all nodes see the same folder?", 1)
        time.sleep(POLL_SECONDS)


def _read(path: Path, must_be_private: bool) -> bytes:
    with path.open(encoding="ascii") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
        if mode & 0o077:
            fix = "put the run's folder on a file system that keeps modes"
            message = f"{path} has mode {mode:04o}, expected 0600, as others can read the run's secret: {fix}"
            if must_be_private:
                raise SecretError(message, 1)
            logger.warning("%s", message)
        return bytes.fromhex(file.read())


def _path(folder: RunFolder) -> Path:
    return folder.logs / "secret"

"""What a launcher (torchrun, srun, or hybrid3d itself) says to a rank in environment variables: read here, typed.

Every function raises `UserMistake` with a variable's name and value where it is missing or not what it must be.
Standard library only.
"""

from __future__ import annotations

import math
import os
import re
from typing import NoReturn

from hybrid3d.errors import UserMistake

RUN = "HYBRID3D_RUN"
CHECKED = "HYBRID3D_CHECKED"  # set for the ranks that hybrid3d's own launcher starts: it has checked everything
RENDEZVOUS_SECONDS = "HYBRID3D_RENDEZVOUS_SECONDS"
HEARTBEAT_SECONDS = "HYBRID3D_HEARTBEAT_SECONDS"

MAX_RANKS = 2**20
MAX_SECONDS = 86_400.0
BEAT_SECONDS = 2.0  # between two signs of life of a rank

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_SET_BY = {"RANK": "torchrun", "SLURM": "srun"}


def under_launcher() -> bool:
    """Whether this process is one rank of a `torchrun` or an `srun` already."""
    return "RANK" in os.environ or ("SLURM_STEP_ID" in os.environ and _integer("SLURM_STEP_NUM_TASKS", 1) > 1)


def adopt_slurm() -> None:
    """Under `srun`, set torchrun's variables from SLURM's. The rendezvous address must be in the environment."""
    if "RANK" in os.environ or not under_launcher():
        return
    world = _integer("SLURM_STEP_NUM_TASKS", 1)
    per_node = _tasks_per_node()
    node = _integer("SLURM_NODEID", 0, len(per_node) - 1, "SLURM_STEP_TASKS_PER_NODE")
    found = {
        "RANK": _integer("SLURM_PROCID", 0, world - 1, "SLURM_STEP_NUM_TASKS"),
        "WORLD_SIZE": world,
        "LOCAL_RANK": _integer("SLURM_LOCALID", 0, per_node[node] - 1, "SLURM_STEP_TASKS_PER_NODE"),
        "LOCAL_WORLD_SIZE": per_node[node],
    }
    os.environ.update({name: str(value) for name, value in found.items()})


def validate() -> None:
    """Hold all variables against each other; call it before any other is used."""
    rendezvous_seconds()
    heartbeat_seconds()
    if os.environ.get(RUN):
        run_id()
    adopt_slurm()
    if "RANK" not in os.environ:
        left = next((name for name in ("WORLD_SIZE", "LOCAL_RANK", CHECKED) if name in os.environ), None)
        if left is not None:
            _refuse(left, "RANK is not set: unset this too, or start through torchrun or srun, which set both")
        return
    world = world_size()
    _integer("RANK", 0, world - 1, "WORLD_SIZE")
    here = _integer("LOCAL_WORLD_SIZE", 1, world, "WORLD_SIZE") if os.environ.get("LOCAL_WORLD_SIZE") else world
    if "LOCAL_RANK" in os.environ:
        _integer("LOCAL_RANK", 0, here - 1, "LOCAL_WORLD_SIZE" if os.environ.get("LOCAL_WORLD_SIZE") else "WORLD_SIZE")


def rank() -> int:
    """This process's number."""
    return _integer("RANK", 0)


def world_size() -> int:
    """How many ranks were started, on all nodes together."""
    return _integer("WORLD_SIZE", 1)


def local_rank() -> int:
    """This process's number on its node."""
    return _integer("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else 0


def local_world_size() -> int:
    """How many ranks were started on this node; all, where the launcher does not say."""
    return _integer("LOCAL_WORLD_SIZE", 1) if os.environ.get("LOCAL_WORLD_SIZE") else world_size()


def master_address(what: str = "ranks") -> tuple[str, int]:
    """Host and port at which the ranks, or other `what`, meet."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE") if not os.environ.get(name)]
    if missing:
        names = " and ".join(missing)
        raise UserMistake(f"{names} not set: rank 0's host and a free port there, the same on all {what}")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not _is_number(port) or not 0 < int(port) < 2**16:
        raise UserMistake(
            f"MASTER_PORT={format_value(port)} is no port: set it to a number from 1 to 65535, the same on all {what}"
        )
    if re.search(r"[\s\x00-\x1f*?]", host):
        raise UserMistake(
            f"MASTER_ADDR={format_value(host)} is no host: set it to a host's name or address on all {what}"
        )
    return host, int(port)


def run_id() -> str:
    """A name that no other run on this machine has: of shared memory, among others."""
    name = os.environ.get(RUN)
    if not name:
        host, port = master_address()
        return re.sub(r"[^A-Za-z0-9_.-]", "_", f"run-{host}-{port}")  # an IPv6 address has colons
    if not _RUN_NAME.fullmatch(name):
        _refuse(RUN, "no name for a run, expected 1 to 100 letters, digits and . _ -, or unset it")
    return name


def rendezvous_seconds() -> float:
    """Seconds in which all ranks must have come."""
    return _seconds(RENDEZVOUS_SECONDS, 300.0)


def heartbeat_seconds() -> float:
    """Seconds without a sign of life after which a rank counts as lost."""
    return _seconds(HEARTBEAT_SECONDS, 40.0, 3 * BEAT_SECONDS)


def _seconds(name: str, default: float, least: float = 0.001) -> float:
    try:
        seconds = float(os.environ.get(name, default))
    except ValueError:
        seconds = math.nan
    if not least <= seconds <= MAX_SECONDS:
        _refuse(name, f"expected seconds, from {least:g} to {MAX_SECONDS:,.0f}")
    return seconds


def format_value(value: str) -> str:
    """A variable's value for a message: short, and as `repr` has it where a character cannot be seen."""
    cut = value if len(value) <= 60 else f"{value[:60]}... ({len(value):,} characters)"
    return cut if cut.isprintable() and cut == cut.strip() and cut else repr(cut)


def _tasks_per_node() -> list[int]:
    """SLURM's `4(x2),1` as 4, 4, 1."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    found: list[int] = []
    for part in os.environ.get(name, "").split(","):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip(), re.ASCII)
        if match is None or len(found) + int(match[2] or 1) > MAX_RANKS or int(match[1]) < 1:
            _refuse(name, "expected ranks of each node, as in 4(x2),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _integer(name: str, low: int, high: int = MAX_RANKS, bound: str = "") -> int:
    """
    Args:
        bound: the variable that `high` follows from, for the message.
    """
    text = os.environ.get(name, "")
    if not _is_number(text) or not low <= int(text) <= high:
        of = f", as {bound}={format_value(os.environ.get(bound, ''))}" if bound else ""
        _refuse(name, f"expected an integer from {low} to {high:,}{of}")
    return int(text)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


def _refuse(name: str, problem: str) -> NoReturn:
    value = os.environ.get(name)
    by = _SET_BY.get(name.partition("_")[0], "the launcher")
    if value is None:
        raise UserMistake(f"{name} is not set, {problem}: {by} sets it")
    raise UserMistake(f"{name}={format_value(value)}: {problem}")

"""Typed access to the environment variables that a launcher (torchrun, srun, or hybrid3d itself) sets for a rank.

Every function raises `UserMistake` with the name and value of a variable that is missing or invalid. Imports only the
standard library.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import ipaddress
import math
import os
import re
import secrets
import socket
from typing import Any, NoReturn

from hybrid3d.errors import UserMistake

RUN = "HYBRID3D_RUN"
CHECKED = "HYBRID3D_CHECKED"  # set by hybrid3d's own launcher, which has run all checks before it starts the ranks
RECIPE = "HYBRID3D_RECIPE"  # YAML that a rank trains instead of its recipe's file, which may have been changed since
MAX_VARIABLE = 2**17 - 2**10  # bytes of a variable, of which Linux allows 2**17 (MAX_ARG_STRLEN)
PARENT = "HYBRID3D_PARENT"  # pid of the process of hybrid3d that has started this one
RENDEZVOUS_SECONDS = "HYBRID3D_RENDEZVOUS_SECONDS"
HEARTBEAT_SECONDS = "HYBRID3D_HEARTBEAT_SECONDS"
NATIVE_STACKS = "HYBRID3D_NATIVE_STACKS"
ADDRESS = "HYBRID3D_ADDRESS"  # at which other nodes reach this one, as the ranks found out at their rendezvous
LOOPBACK = "127.0.0.1"
NOWHERE = "192.0.2.1"  # of RFC 5737, to which packets leave by the default route

# Exit codes of a rank that does not train
DISCONNECTED = 75  # the run has ended, or its group has lost a rank
RUN_LOST = 76  # the only rank that trains hangs; that is reported, and nothing starts it again


class State(bytes, enum.Enum):
    """What a process that does not train has reached, as it tells the one that restarts it."""

    ALIVE = b"[alive]"
    CONNECTED = b"[connected]"
    READY = b"[ready]"  # it has had weights, or has computed rewards
    LEAVING = b"[leaving]"  # it is not needed for now
    ENDING = b"[ending]"  # the run has ended


MAX_RANKS = 2**20
MAX_SECONDS = 86_400.0

# For how many seconds the processes of a run, once they have met, wait for each other, before one that does not answer
# counts as lost. A wait that contains another one is longer: `tests/launch/test_deadlines.py` says which do.
BEAT_SECONDS = 2.0  # between two heartbeats of a rank
KILL_SECONDS = 5.0  # processes that were killed have exited, unless a device blocks them
ANSWER_SECONDS = 5.0  # a thread, or a socket of the same machine, has answered, unless it hangs
EXIT_SECONDS = 15.0  # a rank that has lost another one has written why, has killed what it started, and has exited
MEETING_SECONDS = 15.0  # ranks that are known to be there have created a group
CONNECT_SECONDS = 20.0  # another machine has accepted a connection; who connects has proven that it is of this run
END_SECONDS = 30.0  # ranks that are told to end have ended, and others know; the longest pause before a restart
CLOSE_SECONDS = 60.0  # engines have shut down; each node has answered, or sees a file; a cluster has room
DECISION_SECONDS = 120.0  # rank 0's parent has heard how all ranks have ended, and has decided what follows
DECIDED_SECONDS = 300.0  # a parent knows of it, unless the process that has the store is stopped
START_SECONDS = 600.0  # engines are built; what was asked for is done; some rank of those that all wait has gone on
FORGIVEN_SECONDS = 3600.0  # a rank that was ready for so long has its earlier restarts forgotten

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", re.ASCII)
_SET_BY = {"RANK": "torchrun", "SLURM": "srun"}


def under_launcher() -> bool:
    """Return whether this process is already a rank of a `torchrun` or `srun`."""
    return "RANK" in os.environ or ("SLURM_STEP_ID" in os.environ and _integer("SLURM_STEP_NUM_TASKS", 1) > 1)


def adopt_slurm() -> None:
    """Set torchrun's variables from SLURM's under `srun`, except MASTER_ADDR and MASTER_PORT, which must be set."""
    if "RANK" in os.environ or not under_launcher():
        return
    world = _integer("SLURM_STEP_NUM_TASKS", 1)
    per_node = _tasks_per_node()
    node = _integer("SLURM_NODEID", 0, len(per_node) - 1, "SLURM_STEP_TASKS_PER_NODE")
    variables = {
        "RANK": _integer("SLURM_PROCID", 0, world - 1, "SLURM_STEP_NUM_TASKS"),
        "WORLD_SIZE": world,
        "LOCAL_RANK": _integer("SLURM_LOCALID", 0, per_node[node] - 1, "SLURM_STEP_TASKS_PER_NODE"),
        "LOCAL_WORLD_SIZE": per_node[node],
    }
    os.environ.update({name: str(value) for name, value in variables.items()})


def validate() -> None:
    """Check that all variables are valid and consistent; to be called before any other function."""
    rendezvous_seconds()
    heartbeat_seconds()
    if os.environ.get(RUN):
        run_id()
    adopt_slurm()
    if "RANK" not in os.environ:
        stray = next((name for name in ("WORLD_SIZE", "LOCAL_RANK", CHECKED) if name in os.environ), None)
        if stray is not None:
            _refuse(stray, "RANK is not set: unset this too, or start with torchrun or srun, which set both")
        return
    world = world_size()
    _integer("RANK", 0, world - 1, "WORLD_SIZE")
    has_local_world_size = bool(os.environ.get("LOCAL_WORLD_SIZE"))
    local_world = _integer("LOCAL_WORLD_SIZE", 1, world, "WORLD_SIZE") if has_local_world_size else world
    if "LOCAL_RANK" in os.environ:
        _integer("LOCAL_RANK", 0, local_world - 1, "LOCAL_WORLD_SIZE" if has_local_world_size else "WORLD_SIZE")


def recipe_variable(recipe: str) -> dict[str, str]:
    """Return the variable with the recipe, in ASCII, of ranks that are started; none if it is too long for one."""
    return {RECIPE: recipe} if len(recipe) < MAX_VARIABLE else {}


def rank() -> int:
    """Return the rank of this process."""
    return _integer("RANK", 0)


def world_size() -> int:
    """Return the number of ranks on all nodes."""
    return _integer("WORLD_SIZE", 1)


def local_rank() -> int:
    """Return the rank of this process on its node."""
    return _integer("LOCAL_RANK", 0) if "LOCAL_RANK" in os.environ else 0


def local_world_size() -> int:
    """Return the number of ranks on this node, or the world size if the launcher does not set it."""
    return _integer("LOCAL_WORLD_SIZE", 1) if os.environ.get("LOCAL_WORLD_SIZE") else world_size()


def master_address(members: str = "ranks") -> tuple[str, int]:
    """Return host and port of the rendezvous of the ranks, or nodes; `members` is used in messages."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE") if not os.environ.get(name)]
    if missing:
        names = " and ".join(missing)
        raise UserMistake(f"{names} not set: set rank 0's host and a free port there, the same on all {members}")
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not _is_number(port) or not 0 < int(port) < 2**16:
        raise UserMistake(
            f"MASTER_PORT={format_value(port)} is not a port: set it to a number from 1 to 65535, the same on all "
            f"{members}"
        )
    if re.search(r"[\s\x00-\x1f*?]", host) or not _is_name(host):
        raise UserMistake(
            f"MASTER_ADDR={format_value(host)} is not a host: set it to a host's name or address on all {members}"
        )
    return host, int(port)


def _is_name(host: str) -> bool:
    """Return whether a host's name can be looked up: that of a..b, or with a part of 64 characters, cannot."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def first_address(host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM) -> tuple[Any, ...]:
    """Return the first of what `getaddrinfo` returns.

    Raises:
        OSError: the name does not resolve, or cannot be one.
    """
    if not _is_name(host):  # for this, getaddrinfo raises no OSError
        raise socket.gaierror(socket.EAI_NONAME, "not a host's name")
    return socket.getaddrinfo(host, port, type=kind)[0]


def run_id() -> str:
    """Return a name that is unique among the runs on this machine, which shared memory is named after."""
    name = os.environ.get(RUN)
    if not name:
        host, port = master_address()
        return re.sub(r"[^A-Za-z0-9_.-]", "_", f"run-{host}-{port}")  # an IPv6 address has colons
    if not _RUN_NAME.fullmatch(name):
        _refuse(RUN, "not a valid name of a run, expected 1 to 100 letters, digits and . _ -, or unset it")
    return name


def on_one_machine() -> bool:
    """Return whether the launcher has started all ranks on this machine."""
    return bool(os.environ.get("LOCAL_WORLD_SIZE")) and local_world_size() == world_size()


def own_address() -> str:
    """Return the address at which the other ranks of the run reach this process, where it is to listen.

    Raises:
        OSError: there is no route to rank 0's host.
    """
    if on_one_machine():
        return LOOPBACK
    return os.environ.get(ADDRESS) or source_address(master_address()[0])


def source_address(host: str) -> str:
    """Return this machine's address on the way to a host. Nothing is sent.

    Raises:
        OSError: the name does not resolve, or there is no way.
    """
    family, kind, _, _, address = first_address(host, 9, socket.SOCK_DGRAM)
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Return whether a host's name, or an address, leads to the machine itself."""
    try:
        found = first_address(host, 0)[4][0]
        return ipaddress.ip_address(str(found).partition("%")[0]).is_loopback
    except OSError:
        return False


def master_host(members: str = "ranks") -> str:
    """Return the host at which this process reaches the rendezvous.

    It is MASTER_ADDR, unless that is a name that leads to other machines' loopback: Debian gives a host's own name the
    address 127.0.1.1, where other nodes do not reach it.

    Raises:
        UserMistake: that name is all that is known of the host's address.
    """
    host, _ = master_address(members)
    if on_one_machine() and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # torchrun listens there
        return LOOPBACK
    if on_one_machine() or host == "localhost" or _is_address(host) or not is_loopback(host):
        return host
    try:
        return source_address(NOWHERE)
    except OSError:
        raise UserMistake(
            f"MASTER_ADDR={host} leads to loopback on its own host, where other nodes do not reach it, and there is no "
            f"default route: set MASTER_ADDR to that host's address, the same on all {members}"
        ) from None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


_secret = b""


def set_secret(secret: bytes) -> None:
    """Set what processes of the run prove to each other that they belong to it."""
    global _secret
    _secret = secret


def secret() -> bytes:
    """Return the run's secret; where none was set it is one that no other process knows."""
    if not _secret:
        set_secret(secrets.token_bytes(32))
    return _secret


def derived_key(purpose: str) -> str:
    """Return a key that only processes of this run can know, of which the secret cannot be told."""
    return hmac.new(secret(), purpose.encode(), hashlib.sha256).hexdigest()


def signature(data: bytes | memoryview) -> bytes:
    """Return what only processes of this run can say of these bytes: 32 bytes; without a secret, anybody can."""
    return hmac.digest(_secret, data, "sha256")


def rendezvous_seconds() -> float:
    """Return the seconds within which all ranks must arrive at the rendezvous."""
    return _seconds(RENDEZVOUS_SECONDS, 300.0)


def heartbeat_seconds() -> float:
    """Return the seconds without a heartbeat after which a rank counts as lost."""
    return _seconds(HEARTBEAT_SECONDS, 40.0, 3 * BEAT_SECONDS)


def wants_native_stacks() -> bool:
    """Return whether a rank that does not move writes its C stacks too; it is stopped for seconds for that."""
    return os.environ.get(NATIVE_STACKS, "0") not in ("", "0")


def _seconds(name: str, default: float, minimum: float = 0.001) -> float:
    try:
        seconds = float(os.environ.get(name, default))
    except ValueError:
        seconds = math.nan
    if not minimum <= seconds <= MAX_SECONDS:
        _refuse(name, f"expected seconds, from {minimum:g} to {MAX_SECONDS:,.0f}")
    return seconds


def check_vllm_variables() -> None:
    """Check that vLLM's own variables do not select code of vLLM that hybrid3d cannot work with.

    `VLLM_DISTRIBUTED_USE_SPLIT_GROUP` makes vLLM create its groups with `split_group`, in the order of ranks: the order
    of the placement's slots would be lost. `VLLM_USE_V2_MODEL_RUNNER=0` selects the first model runner, whose CUDA
    graphs wrap the model.
    """
    if os.environ.get("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0").strip() != "0":
        _refuse(
            "VLLM_DISTRIBUTED_USE_SPLIT_GROUP",
            "vLLM would number the ranks of its groups by rank, and not as the placement does: unset it",
        )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1").strip() in ("", "0"):
        _refuse("VLLM_USE_V2_MODEL_RUNNER", "vLLM's first model runner, which this selects, is not supported: unset it")


def format_value(value: str) -> str:
    """Return a variable's value for a message: shortened, and as its repr if characters are not visible."""
    short = value if len(value) <= 60 else f"{value[:60]}... ({len(value):,} characters)"
    return short if short.isprintable() and short == short.strip() and short else repr(short)


def _tasks_per_node() -> list[int]:
    """Return the tasks of each node, SLURM's `4(x2),1` as 4, 4, 1."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    tasks: list[int] = []
    for part in os.environ.get(name, "").split(","):
        match = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip(), re.ASCII)
        if match is None or len(tasks) + int(match[2] or 1) > MAX_RANKS or int(match[1]) < 1:
            _refuse(name, "expected the tasks of each node, as in 4(x2),1")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _integer(name: str, low: int, high: int = MAX_RANKS, bound: str = "") -> int:
    """Return a variable as an integer from `low` to `high`, which follows from the variable `bound`."""
    text = os.environ.get(name, "")
    if not _is_number(text) or not low <= int(text) <= high:
        reason = f", because {bound}={format_value(os.environ.get(bound, ''))}" if bound else ""
        _refuse(name, f"expected an integer from {low} to {high:,}{reason}")
    return int(text)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d{1,9}", text, re.ASCII) is not None


def _refuse(name: str, problem: str) -> NoReturn:
    value = os.environ.get(name)
    launcher = _SET_BY.get(name.partition("_")[0], "the launcher")
    if value is None:
        raise UserMistake(f"{name} is not set, {problem}: {launcher} sets it")
    raise UserMistake(f"{name}={format_value(value)}: {problem}")

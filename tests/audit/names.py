"""Check: every name of vLLM, Megatron, Transformer Engine and private name of torch that hybrid3d uses exists.

The names come from the tables of patches, from the imports and the attributes of imported modules in `src/hybrid3d`,
and from the tables below: attributes of objects, which no reader of the sources can assign to a class. A function's
parameters must be the CPU build's.
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audit import answers, fake_transformer_engine, faults

SOURCES = Path(__file__).resolve().parents[2] / "src" / "hybrid3d"
ENGINES = ("megatron", "vllm", "transformer_engine")

# Private attributes of objects, and the class or module that has each.
PRIVATE = {
    "_Options": "torch.distributed.ProcessGroupGloo",
    "_apply_scaling": "megatron.core.models.common.embeddings.rotary_pos_embedding.RotaryEmbedding",
    "_buffers": "torch.nn.Module",
    "_cdata": "torch.UntypedStorage",
    "_init_optimizer_states_with_dummy_values": "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer",
    "_non_persistent_buffers_set": "torch.nn.Module",
    "_parameters": "torch.nn.Module",
    "_schema": "torch._ops.OpOverload",
}
# Public attributes of vLLM's objects on the way to the model of a rank, and of its config.
ATTRIBUTES = {
    "vllm.LLM": "llm_engine reset_prefix_cache sleep wake_up generate",
    "vllm.v1.engine.llm_engine.LLMEngine": "model_executor engine_core model_config",
    "vllm.v1.executor.uniproc_executor.UniProcExecutor": "driver_worker",
    "vllm.v1.worker.worker_base.WorkerWrapperBase": "worker",
    "vllm.v1.worker.gpu_worker.Worker": "model_runner",
    "vllm.v1.worker.gpu.model_runner.GPUModelRunner": "get_model vllm_config",
    "vllm.config.VllmConfig": "model_config device_config",
    "vllm.config.ModelConfig": "dtype try_get_generation_config",
    "vllm.config.DeviceConfig": "device",
}
# What differs between the builds on purpose, and what it must be on CUDA with Transformer Engine: a value or a type.
ON_CUDA = {
    "megatron.core.extensions.transformer_engine.HAVE_TE": True,
    "megatron.core.extensions.transformer_engine.TEColumnParallelLinear": type,
    "megatron.core.extensions.transformer_engine.TELayerNormColumnParallelLinear": type,
    "megatron.core.extensions.transformer_engine.TELinear": type,
    "megatron.core.extensions.transformer_engine.TERowParallelLinear": type,
    "megatron.core.optimizer.Adam": type,
    "megatron.core.transformer.multi_latent_attention.HAVE_TE": True,
    "megatron.core.transformer.multi_latent_attention.TELinear": type,
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": object,
    "vllm.platforms.current_platform": object,
    "torch._C._cuda_hasPrimaryContext": object,  # only the CUDA build has it, and only checks of GPUs call it
}


def check(options: answers.Options) -> answers.Answers:
    if options.cuda:
        fake_transformer_engine.install(options.transformer_engine)
    from hybrid3d import patches
    from hybrid3d.rollout import patches as vllm
    from hybrid3d.train.megatron import patches as megatron

    faults.inject(options.inject, "names")
    targets = {patch.target for patch in (*patches.TORCH, *megatron.ALL, *vllm.ALL)}
    files = [path.read_text() for path in sorted(SOURCES.rglob("*.py"))]
    imported = {name for source in files for name in used(source)}
    owned = {f"{owner}.{name}" for name, owner in PRIVATE.items()}
    owned |= {f"{owner}.{name}" for owner, names in ATTRIBUTES.items() for name in names.split()}
    yield "private attributes without an owner in this check", sorted(private_attributes(files) - PRIVATE.keys())
    for name in sorted(targets | imported | owned):
        yield name, describe(name, options.cuda)


def used(source: str) -> Iterator[str]:
    """Yield the full name of everything of the engines, and everything private of torch, that a file uses."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}  # by the name in this file
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                modules[one.asname or one.name.partition(".")[0]] = (
                    one.name if one.asname else one.name.partition(".")[0]
                )
                yield from [one.name] if _matters(one.name) else []
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                modules[one.asname or one.name] = f"{node.module}.{one.name}"
                yield from [f"{node.module}.{one.name}"] if _matters(f"{node.module}.{one.name}") else []
    for node in ast.walk(tree):
        name = _dotted(node)
        root, _, rest = name.partition(".")
        if rest and _matters(f"{modules.get(root, '')}.{rest}"):
            yield f"{modules[root]}.{rest}"


def _dotted(node: ast.AST) -> str:
    """Return `a.b.c` of an attribute of names, else nothing."""
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _matters(name: str) -> bool:
    top, *rest = name.split(".")
    return top in ENGINES or (top == "torch" and any(re.match(r"_[^_]", part) for part in rest))


def private_attributes(files: list[str]) -> set[str]:
    """Return the private attributes that files use of objects and do not define: those of other people's classes."""
    trees = [ast.parse(source) for source in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    ours = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    ours |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    ours |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    resolved = {name.split(".")[-1] for source in files for name in used(source)}
    standard = {"_exit", "_fields", "_resource_tracker"}  # of Python's own os, ast and multiprocessing
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr)}
    return found - ours - resolved - standard


def describe(name: str, cuda: bool) -> str:
    """Return what a name stands for: a function or class with its parameters, a module, or the type of a value.

    Args:
        cuda: whether this is the environment with the CUDA builds and Transformer Engine; elsewhere, what differs on
            purpose is described as it must be there.
    """
    if name in ON_CUDA:
        expected = ON_CUDA[name]
        found = _resolve(name) if cuda else expected
        fits = found is expected or (expected is not True and isinstance(found, expected) and found is not _ABSENT)
        return str(expected) if fits else f"not {expected}: {found!r}"
    found = _resolve(name)
    if found is _ABSENT:
        return "absent"
    if inspect.ismodule(found):
        return "module"
    if isinstance(found, enum.EnumMeta):  # what it is called with depends on the version of Python
        return f"enum of {', '.join(found.__members__)}"
    if not callable(found):
        return type(found).__name__
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):  # compiled
        return "callable"
    return f"({', '.join(map(_parameter, parameters))})"


_ABSENT = object()


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    only = "keyword " if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    return f"{only}{stars}{parameter.name}{'' if parameter.default is inspect.Parameter.empty else '='}"


def _resolve(name: str) -> Any:
    """Import what can be imported of a dotted name, and look up the rest."""
    parts = name.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        for part in parts[n:]:
            owner, found = found, getattr(found, part, _ABSENT)
            if found is _ABSENT:
                return _set_by(owner, part)
        return found
    return _ABSENT


def _set_by(owner: Any, attribute: str) -> Any:
    """Find an attribute that a class only declares, or that its methods or those of its bases set on `self`."""
    if not inspect.isclass(owner):
        return _ABSENT
    for base in inspect.getmro(owner):
        if attribute in vars(base).get("__annotations__", {}):
            return f"declared by {base.__name__}"
        if base.__module__ != "builtins" and re.search(rf"\bself\.{attribute}\b\s*(:[^=\n]+)?=[^=]", _source(base)):
            return f"set by {base.__name__}"
    return _ABSENT


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # compiled
        return ""


if __name__ == "__main__":
    answers.answer(check)

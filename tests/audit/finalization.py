"""Check: after a sync, finalization on the CUDA branch has left what vLLM's own loading of the same weights leaves.

On CPU tensors, three syncs with other weights each, and before each all memory but that of buffers is overwritten:
afterwards every tensor of the model, and of the kernels and other objects that it keeps, equals that of a vLLM that
loaded the last weights itself, and lies where it lay before. No call in between made the host wait for the GPU, and no
kernel that was replaced lives on with a copy of its own.

A part of the check is a GPU and a precision, such as `b200-fp8`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from audit import answers, cases, fake_device, fake_gpus, fake_kernels, faults, state, weights

SYNCS = 3


def check(options: answers.Options) -> answers.Answers:
    device, _, precision = (options.part or "h100-bfloat16").partition("-")
    with fake_gpus.installed(device):
        fake_device.install(fake_device.DEVICES[device])
        fake_kernels.install(fake_device.DEVICES[device].capability)
        from vllm.platforms import current_platform

        from audit.host_waits import HostWaits

        assert current_platform.is_cuda()
        waits = HostWaits()
        waits.install()
        faults.inject(options.inject, "finalization")
        quantized = precision != "bfloat16"
        for _, name, recipe, rank in cases.rollout_cases(options.models, options.families, quantized):
            if rank in (0, recipe.rollout.tp * recipe.rollout.dp - 1):
                kernels: list[str] = []
                problems = list(_problems(recipe, rank, precision, waits, kernels))
                yield f"{name} ({', '.join(kernels)}): values and places", problems
                yield f"{name}: synchronizations", sorted(set(waits.calls))


def _problems(recipe: Any, rank: int, precision: str, waits: Any, kernels: list[str]) -> Iterator[str]:
    from audit.host_waits import GPU
    from hybrid3d.reshard.fp8 import kind_of
    from hybrid3d.rollout.patches import noting_requantization
    from hybrid3d.rollout.sink import VllmSink, names_of

    plain = cases.shapes_of(Path(recipe.model.path))

    def made(seed: int) -> dict[str, Any]:
        return weights.weights_in(precision, plain, seed, {name for name in plain if kind_of(name) in rounded})

    rounded: set[str] = set()
    with _model(recipe, rank, precision) as (model, config):
        with noting_requantization() as noted:
            _load(model, config, made(0))  # an engine that has started
        kernels += _kernels(model)
        places = {path: tensor.data_ptr() for path, tensor in state.tensors_of(model).items()}
        before = state.kernels_of(model)
        config.device_config.device = GPU
        sink = VllmSink(model, config, names_of(noted, model))
        sink.demand_for(weights.shapes_in(precision, plain))
        rounded |= sink.rounded_scales
        order = list(dict.fromkeys(sink._layer_of[piece.view.tensor] for piece in sink.demand.pieces))
        sink.prepare(order)
        waits.calls.clear()
        for number in range(1, SYNCS + 1):
            state.overwrite(model)
            _sync(sink, order, made(number), waits)
        yield from (f"{one.path}.{one.name}: a replaced kernel keeps it" for one in state.stale_copies(before, model))
        found = state.tensors_of(model)
    with _model(recipe, rank, precision) as (truth, config):
        _load(truth, config, made(SYNCS))
        expected = state.tensors_of(truth)
    yield from (f"{name}: in one model only" for name in sorted(found.keys() ^ expected.keys()))
    for name in sorted(found.keys() & expected.keys()):
        if not _equal(found[name], expected[name]):
            yield f"{name}: differs from vLLM's own loading"
        if found[name].numel() and found[name].data_ptr() != places.get(name):
            yield f"{name}: moved"


@contextlib.contextmanager
def _model(recipe: Any, rank: int, precision: str) -> Iterator[tuple[Any, Any]]:
    """Build vLLM's model of a rank with memory."""
    from hybrid3d.rollout.probe import model_of_rank

    names = cases.shapes_of(Path(recipe.model.path)).keys()
    with weights.vllm_in(precision, names), model_of_rank(recipe, rank, device="cpu") as (model, config):
        _know_peers(recipe)
        yield model, config


def _know_peers(recipe: Any) -> None:
    """Give vLLM's kernel of experts what it asks about the peers of an expert-parallel rank: their number."""
    from vllm.distributed import parallel_state

    if recipe.rollout.dp > 1:
        group = parallel_state.get_ep_group()
        peers = SimpleNamespace(world_size=group.world_size, dp_world_size=recipe.rollout.dp, rank=group.rank_in_group)
        group.device_communicator = SimpleNamespace(all2all_manager=peers, destroy=lambda: None)


def _kernels(model: Any) -> list[str]:
    """Return the names of the classes that vLLM has selected to compute layers."""
    methods = [method for m in model.modules() if (method := getattr(m, "quant_method", None)) is not None]
    linear = [kernel for m in methods for name in ("fp8_linear", "kernel") if (kernel := getattr(m, name, None))]
    experts = [m.experts_cls.__name__ for m in methods if getattr(m, "experts_cls", None)]
    return sorted({*(type(kernel).__name__ for kernel in linear), *experts})


def _load(model: Any, config: Any, loaded: dict[str, Any]) -> None:
    """Load weights as vLLM's own loader does."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), torch.no_grad(), set_default_torch_dtype(dtype):
        model.load_weights(iter(loaded.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def _sync(sink: Any, order: list[int | None], sent: dict[str, Any], waits: Any) -> None:
    import torch

    sink.begin()
    for layer in order:
        with waits:
            sink.open(layer)
        for piece in sink.demand.pieces:
            if sink._layer_of[piece.view.tensor] == layer:
                index = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.size, strict=True))
                with torch.no_grad():
                    sink.write(piece).copy_(sent[piece.name][index])
        with waits:
            sink.close(layer)
    sink.end()


def _equal(a: Any, b: Any) -> bool:
    """Compare bit by bit."""
    import torch

    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return a.numel() == 0 or torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)))


if __name__ == "__main__":
    answers.answer(check)

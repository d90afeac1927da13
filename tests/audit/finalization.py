"""Check: after a sync, finalization on the CUDA branch has left what vLLM's own loading of the same weights leaves.

On CPU tensors, three syncs with other weights each: afterwards every tensor of the model equals that of a vLLM that
loaded the last weights itself, lies where it lay before, and no call in between made the host wait for the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from audit import answers, cases, fake_gpus, fake_hopper, faults

SYNCS = 3


def check(options: answers.Options) -> answers.Answers:
    with fake_gpus.installed():
        fake_hopper.install()
        from vllm.platforms import current_platform

        from audit.host_waits import HostWaits

        assert current_platform.is_cuda()
        waits = HostWaits()
        waits.install()
        faults.inject(options.inject, "finalization")
        for family, name, recipe, rank in cases.rollout_cases(options.models, options.families):
            if rank in (0, recipe.rollout.tp * recipe.rollout.dp - 1):
                problems = list(_problems(recipe, rank, cases.shapes_of(options.models, family), waits))
                yield f"{name}: values and places", problems
                yield f"{name}: synchronizations", sorted(set(waits.calls))


def _problems(recipe: Any, rank: int, shapes: Any, waits: Any) -> Iterator[str]:
    from audit.host_waits import GPU
    from hybrid3d.rollout.probe import model_of_rank
    from hybrid3d.rollout.sink import VllmSink

    with model_of_rank(recipe, rank, device="cpu") as (truth, config):
        _know_peers(recipe)
        _load(truth, config, _weights(shapes, SYNCS))
    with model_of_rank(recipe, rank, device="cpu") as (model, config):
        _know_peers(recipe)
        _load(model, config, _weights(shapes, 0))  # an engine that has started
        places = {name: tensor.data_ptr() for name, tensor in _tensors(model).items()}
        config.device_config.device = GPU
        sink = VllmSink(model, config)
        sink.demand_for(shapes)
        order = list(dict.fromkeys(sink._layer_of[piece.view.tensor] for piece in sink.demand.pieces))
        sink.prepare(order)
        waits.calls.clear()
        for number in range(1, SYNCS + 1):
            _sync(sink, order, _weights(shapes, number), waits)
        found = _tensors(model)
    expected = _tensors(truth)
    yield from (f"{name}: in one model only" for name in sorted(found.keys() ^ expected.keys()))
    for name in sorted(found.keys() & expected.keys()):
        if not _equal(found[name], expected[name]):
            yield f"{name}: differs from vLLM's own loading"
        if found[name].numel() and found[name].data_ptr() != places.get(name):
            yield f"{name}: moved"


def _know_peers(recipe: Any) -> None:
    """Give vLLM's kernel of experts what it asks about the peers of an expert-parallel rank: their number."""
    from vllm.distributed import parallel_state

    if recipe.rollout.dp > 1:
        group = parallel_state.get_ep_group()
        peers = SimpleNamespace(world_size=group.world_size, dp_world_size=recipe.rollout.dp, rank=group.rank_in_group)
        group.device_communicator = SimpleNamespace(all2all_manager=peers, destroy=lambda: None)


def _load(model: Any, config: Any, weights: dict[str, Any]) -> None:
    """Load weights as vLLM's own loader does."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = config.model_config.dtype
    with set_current_vllm_config(config), torch.no_grad(), set_default_torch_dtype(dtype):
        model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))


def _sync(sink: Any, order: list[int | None], weights: dict[str, Any], waits: Any) -> None:
    import torch

    sink.begin()
    for layer in order:
        sink.open(layer)
        for piece in sink.demand.pieces:
            if sink._layer_of[piece.view.tensor] == layer:
                index = tuple(slice(at, at + n) for at, n in zip(piece.box.start, piece.box.size, strict=True))
                with torch.no_grad():
                    sink.write(piece).copy_(weights[piece.name][index])
        with waits:
            sink.close(layer)
    sink.end()


def _weights(shapes: Any, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}


def _tensors(model: Any) -> dict[str, Any]:
    """Return every parameter, buffer and other tensor attribute of a model's modules."""
    import torch

    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(tensor, torch.Tensor):
                found[f"{path}.{name}"] = tensor
    return found


def _equal(a: Any, b: Any) -> bool:
    """Compare bit by bit."""
    import torch

    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    return a.numel() == 0 or torch.equal(*(t.detach().contiguous().flatten().view(torch.uint8) for t in (a, b)))


if __name__ == "__main__":
    answers.answer(check)

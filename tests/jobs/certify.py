"""One rank of certifications into which faults are injected, one after another: what each is refused for.

    torchrun --nproc-per-node 2 certify.py OUT.json MODEL SETTINGS FAULT ...

SETTINGS are separated by spaces. Faults are patches of the live engine or of the sync; between two of them the weights
are synced without one. Those named `healthy` and `healthy_again` are none. OUT.json has, for each fault, what the
certification found.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch

from hybrid3d import distributed
from hybrid3d.certify.findings import Findings
from hybrid3d.certify.rounds import Certification
from hybrid3d.certify.task import raw_recipe
from hybrid3d.config import read_recipe
from hybrid3d.config.load import apply_overrides
from hybrid3d.rollout import finalize
from hybrid3d.train.megatron import runtime

ROUNDS = 3  # the first dense, the second of changes where that is possible


@contextlib.contextmanager
def patched(owner, name, make):
    real = getattr(owner, name)
    setattr(owner, name, make(real))
    try:
        yield
    finally:
        setattr(owner, name, real)


def modules_with(certification, name):
    model = certification._inspection.model
    return [m for m in model.modules() if isinstance(getattr(m, name, None), torch.Tensor)]


def kept_at_finalizing(select):
    """Finalizing puts back what the selected tensors were before the sync."""
    old = {}

    def make_open(real):
        def opening(opened):
            old[opened] = {key: t.detach().clone() for key, t in select(opened).items()}
            real(opened)

        return opening

    def make_finalize(real):
        def finalizing(opened, vllm_config):
            real(opened, vllm_config)
            with torch.no_grad():
                for key, tensor in select(opened).items():
                    tensor.copy_(old[opened][key])

        return finalizing

    @contextlib.contextmanager
    def kept(certification):
        with (
            patched(finalize.OpenUnit, "open", make_open),
            patched(finalize.OpenUnit, "finalize", make_finalize),
        ):
            yield

    return kept


def named(*suffixes):
    """Live tensors of an open unit: parameters, buffers and attributes."""

    def select(opened):
        found = {}
        for path, module in opened.unit.modules():
            for key in suffixes:
                module_part, _, name = key.rpartition(".")
                tensor = getattr(module, name, None)
                if path.endswith(module_part) and isinstance(tensor, torch.Tensor):
                    found[f"{path}.{name}"] = tensor
        return found

    return select


@contextlib.contextmanager
def processed_twice(certification):
    """vLLM's processing permutes a weight that is permuted already, as kernels for GPUs want it: two halves swap."""

    def make(real):
        def twice(root, *args):
            real(root, *args)
            for module in root.modules():
                weight = getattr(module, "w2_weight", None)
                if isinstance(weight, torch.Tensor):
                    weight.data.copy_(weight.data.roll(weight.shape[-1] // 2, -1))

        return twice

    with patched(finalize, "process_weights_after_loading", make):
        yield


@contextlib.contextmanager
def tied_head_stale(certification):
    """The head computes with the embedding as it was before the sync."""
    model = certification._inspection.model
    head = model.lm_head
    stale = torch.nn.Parameter(model.model.embed_tokens.weight.detach().clone(), requires_grad=False)

    def make(real):
        def finalizing(opened, vllm_config):
            real(opened, vllm_config)
            if any(module is head for _, module in opened.unit.modules()):
                head._parameters["weight"] = stale

        return finalizing

    real = head._parameters["weight"]
    with patched(finalize.OpenUnit, "finalize", make):
        yield
    head._parameters["weight"] = real


@contextlib.contextmanager
def buffer_lost_in_sleep(certification):
    """Waking leaves zeros in a buffer that no checkpoint has."""
    buffers = [m.cos_sin_cache for m in modules_with(certification, "cos_sin_cache")]
    kept = [buffer.clone() for buffer in buffers]

    def make(real):
        def sleeping():
            real()
            for buffer in buffers:
                buffer.zero_()

        return sleeping

    with patched(certification._engine, "sleep", make):
        yield
    for buffer, values in zip(buffers, kept, strict=True):
        buffer.copy_(values)


@contextlib.contextmanager
def expert_map_off_by_one(certification):
    maps = [m.expert_map for m in modules_with(certification, "expert_map")]
    assert maps
    for expert_map in maps:
        expert_map.copy_(expert_map.roll(1))
    yield
    for expert_map in maps:
        expert_map.copy_(expert_map.roll(-1))


@contextlib.contextmanager
def experts_off_by_one(certification):
    """The sync writes each expert's weights into the next one's place."""

    def make(real):
        def finalizing(opened, vllm_config):
            with torch.no_grad():
                for _, module in opened.unit.modules():
                    if isinstance(getattr(module, "w13_weight", None), torch.Tensor):
                        module.w13_weight.data.copy_(module.w13_weight.data.roll(1, 0))
            real(opened, vllm_config)

        return finalizing

    with patched(finalize.OpenUnit, "finalize", make):
        yield


@contextlib.contextmanager
def padding_not_zeroed(certification):
    def make(real):
        def opening(opened):
            real(opened)
            for fill in opened._fills:
                opened.view(fill.view, fill.size).fill_(0.25)

        return opening

    with patched(finalize.OpenUnit, "open", make):
        yield


@contextlib.contextmanager
def cache_kept(certification):
    with patched(certification._engine, "reset_cache", lambda real: lambda: None):
        yield


@contextlib.contextmanager
def wrong_rope(certification):
    """The live engine rotates by another base than `config.json` has."""
    rotary = modules_with(certification, "cos_sin_cache")
    kept = [m.cos_sin_cache.clone() for m in rotary]
    for module in rotary:
        module.base = module.base * 2
        module.cos_sin_cache.copy_(module._compute_cos_sin_cache().to(module.cos_sin_cache))
        module.base = module.base / 2
    yield
    for module, values in zip(rotary, kept, strict=True):
        module.cos_sin_cache.copy_(values)


@contextlib.contextmanager
def megatron_rope(certification):
    """Megatron rotates by another base, so that the engines agree on all weights and on nothing that they compute."""
    tables = [m for s in certification._policy.stages for m in s.modules() if hasattr(m, "inv_freq")]
    assert tables
    kept = [m.inv_freq.clone() for m in tables]
    for module in tables:
        module.inv_freq = module.inv_freq * 3
        type(module).forward.cache_clear()
    yield
    for module, values in zip(tables, kept, strict=True):
        module.inv_freq = values
        type(module).forward.cache_clear()


@contextlib.contextmanager
def healthy(certification):
    yield


FAULTS = {
    "healthy": healthy,
    "healthy_again": healthy,
    "processed_twice": processed_twice,
    "tied_head_stale": tied_head_stale,
    "buffer_lost_in_sleep": buffer_lost_in_sleep,
    "derived_stale": kept_at_finalizing(named("W_UV", "W_UK_T")),
    "expert_map_off_by_one": expert_map_off_by_one,
    "experts_off_by_one": experts_off_by_one,
    "padding_not_zeroed": padding_not_zeroed,
    "cache_kept": cache_kept,
    "bias_not_synced": kept_at_finalizing(named("qkv_proj.bias")),
    "router_bias_not_synced": kept_at_finalizing(named("gate.e_score_correction_bias")),
    "wrong_rope": wrong_rope,
    "megatron_rope": megatron_rope,
}


@contextlib.contextmanager
def old_scales(certification):
    """A scale of the KV cache keeps the value that belonged to older weights."""

    def make(real):
        def finalizing(opened, vllm_config):
            real(opened, vllm_config)
            for _, module in opened.unit.modules():
                if isinstance(getattr(module, "_v_scale", None), torch.Tensor):
                    module._v_scale.fill_(0.5)

        return finalizing

    with patched(finalize.OpenUnit, "finalize", make):
        yield
    for module in modules_with(certification, "_v_scale"):
        module._v_scale.fill_(1.0)


FAULTS["old_scales"] = old_scales


def main() -> None:
    out, model, settings, *faults = sys.argv[1:]
    raw, problems = raw_recipe("certify", model, 288), []
    apply_overrides(raw, settings.split(), problems)
    recipe = read_recipe(raw, "certify", problems)
    group = distributed.start()
    runtime.initialize(recipe.train, recipe.run.seed)
    folder = Path(out).parent
    certification = Certification(recipe, folder, group, range(group.size()))
    results = {}
    for fault in faults:
        certification.findings = Findings()
        certification.deltas, certification.mismatch = [], 0.0
        with FAULTS[fault](certification):
            certification.run(ROUNDS, lambda message: None)
        results[fault] = certification.result()
        certification._sync.require_dense()
        certification._sync.run(certification.rounds)
        certification._inspection.forget()
        if group.rank() == 0:
            Path(out).write_text(json.dumps(results))
    certification.close()
    sys.stdout.flush()
    os._exit(0)  # vLLM has destroyed the default group


if __name__ == "__main__":
    main()

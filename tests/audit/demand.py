"""Check: vLLM's CUDA build wants the same pieces as its CPU build, with the same KV cache, on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

from audit import answers, cases, fake_device, fake_gpus, faults


def check(options: answers.Options) -> answers.Answers:
    with fake_gpus.installed(options.device) if options.cuda else nullcontext():
        if options.cuda:
            fake_device.install(fake_device.DEVICES[options.device])
        from hybrid3d.rollout.probe import trace_demand

        faults.inject(options.inject, "demand")
        for _, name, recipe, rank in cases.rollout_cases(options.models, options.families):
            asked = trace_demand(recipe, cases.shapes_of(Path(recipe.model.path)), rank)
            pieces = sorted(f"{p.name} {p.box} {p.view} {p.dtype}" for p in asked.demand.pieces)
            fills = list(map(str, asked.demand.fills))
            yield name, {"pieces": pieces, "fills": fills, "kv": sorted(asked.kv_bytes.items())}


if __name__ == "__main__":
    answers.answer(check)

"""Check: with Transformer Engine's modules Megatron holds the same pieces, and their parameters carry the same marks.

By these marks gradients are summed, reduced and counted in norms: whether a parameter is sharded by tensor parallelism
and along which dim, whether it is reduced with the dense ones, and whether sequence parallelism makes its gradient
partial.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from audit import answers, cases, fake_gpus, fake_transformer_engine, faults
from hybrid3d.families import EXPERT


def check(options: answers.Options) -> answers.Answers:
    with fake_gpus.installed() if options.cuda else nullcontext():
        if options.cuda:
            fake_transformer_engine.install(options.transformer_engine)
        from hybrid3d.config import Train
        from hybrid3d.inputs.models import read_config
        from hybrid3d.train.megatron import runtime

        assert options.cuda == runtime.USE_TE
        for family in options.families:
            config = read_config(str(options.models / family))
            for layout in cases.trains(family):
                for rank in (0, 3):
                    yield f"{family} {cases.said(layout)} rank {rank}", _held(config, Train(**layout), rank, options)


def _held(config: Any, layout: Any, rank: int, options: answers.Options) -> list[str]:
    """Return each piece that a rank holds, with the marks of its parameter.

    The model has memory: on meta, Transformer Engine's modules mark nothing.
    """
    import torch

    from hybrid3d.train.megatron.build import build_model
    from hybrid3d.train.megatron.runtime import as_rank
    from hybrid3d.train.megatron.source import megatron_weights

    with as_rank(rank, layout, 4):
        stages = build_model(config, layout, torch.bfloat16)
        faults.inject(options.inject, "attributes", stages)
        live = {f"stage{i}.{name}": p for i, stage in enumerate(stages) for name, p in stage.named_parameters()}
        pieces = megatron_weights(stages, config).pieces
        return sorted(f"{p.name} {p.box} {p.dtype} {_marks(p, live.get(p.view.tensor))}" for p in pieces)


def _marks(piece: Any, parameter: Any) -> str:
    """Return the marks of the parameter that a piece is of.

    The dim of routed experts is left out: with expert communication of Megatron's own, Transformer Engine's grouped
    linears have no parallel mode, and mark dim 0 also where dim 1 is sharded. In Megatron-Core 0.16.1 only Muon, FSDP
    and refit read it, which hybrid3d does not use.
    """
    if parameter is None:
        return "a buffer"
    sharded = bool(getattr(parameter, "tensor_model_parallel", False))
    dim = "" if EXPERT.search(piece.name) else f" along {getattr(parameter, 'partition_dim', None)}"
    return ", ".join(
        (
            f"sharded{dim}" if sharded else "not sharded",
            f"allreduce {getattr(parameter, 'allreduce', True)}",
            f"sequence_parallel {bool(getattr(parameter, 'sequence_parallel', False))}",
        )
    )


if __name__ == "__main__":
    answers.answer(check)

"""Check: with Transformer Engine's modules Megatron holds the same pieces, and their parameters carry the same marks.

By these marks gradients are summed, reduced and counted in norms: whether a parameter is sharded by tensor parallelism
and along which dim, whether it is reduced with the dense ones, and whether sequence parallelism makes its gradient
partial.
"""

from __future__ import annotations

from typing import Any

from audit import answers, cases, fake_gpus, fake_transformer_engine, faults


def check(options: answers.Options) -> answers.Answers:
    if options.cuda:
        fake_gpus.installed()
        fake_transformer_engine.install(options.transformer_engine)
    import torch

    from hybrid3d.config import Train
    from hybrid3d.inputs.models import read_config
    from hybrid3d.train import kernels
    from hybrid3d.train.model import build_model
    from hybrid3d.train.runtime import as_rank
    from hybrid3d.train.weights import megatron_weights

    assert options.cuda == kernels.USE_TE
    for family in options.families:
        config = read_config(str(options.models / family))
        for layout in (Train(**layout) for layout in cases.trains(family)):
            for rank in (0, 3):
                with as_rank(rank, layout, 4):
                    stages = build_model(config, layout, torch.bfloat16, meta=True)
                    faults.inject(options.inject, "attributes", stages)
                    live = {f"stage{i}.{n}": p for i, stage in enumerate(stages) for n, p in stage.named_parameters()}
                    pieces = megatron_weights(stages, config).pieces
                held = sorted(f"{p.name} {p.box} {p.dtype} {_marks(live.get(p.view.tensor))}" for p in pieces)
                yield f"{family} {_said(layout)} rank {rank}", held


def _said(layout: Any) -> str:
    return " ".join(f"{axis}{getattr(layout, axis)}" for axis in ("tp", "pp", "dp", "ep", "etp"))


def _marks(parameter: Any) -> str:
    if parameter is None:
        return "a buffer"
    sharded = bool(getattr(parameter, "tensor_model_parallel", False))
    return ", ".join(
        (
            f"sharded along {parameter.partition_dim}" if sharded else "not sharded",
            f"allreduce {getattr(parameter, 'allreduce', True)}",
            f"sequence_parallel {bool(getattr(parameter, 'sequence_parallel', False))}",
        )
    )


if __name__ == "__main__":
    answers.answer(check)

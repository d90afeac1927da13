"""Check: asking an engine on meta allocates nothing on a GPU, and makes a context on no other than the rank's own.

Megatron is asked as a rank does after it has taken its device, and as `hybrid3d`'s checks ask it before that, when the
current device is still GPU 0 in every rank. The GPUs are faked (`fake_gpus.py`).
"""

from __future__ import annotations

from pathlib import Path

from audit import answers, cases, fake_device, fake_gpus, fake_transformer_engine, faults

OWN = 3  # the rank's device


def check(options: answers.Options) -> answers.Answers:
    with fake_gpus.installed(options.device) as gpus:
        if options.part == "vllm":
            fake_device.install(fake_device.DEVICES[options.device])
            yield from _vllm(options, gpus)
        else:
            if options.part == "transformer-engine":
                fake_transformer_engine.install(options.transformer_engine)
            yield from _megatron(options, gpus)


def _megatron(options: answers.Options, gpus: fake_gpus.FakeGpus) -> answers.Answers:
    import torch
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from hybrid3d.config import Train
    from hybrid3d.inputs.models import read_config
    from hybrid3d.train.megatron import runtime
    from hybrid3d.train.megatron import runtime as kernels
    from hybrid3d.train.megatron.probe import expected_shapes, holdings_of

    def begin() -> None:
        gpus.forget()
        MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # of a process that has built no model

    assert runtime.ON_CUDA
    assert (options.part == "transformer-engine") == kernels.USE_TE
    faults.inject(options.inject, "contexts")
    for family in options.families:
        config = read_config(str(options.models / family))
        begin()
        expected_shapes(config)
        yield f"{family} before the rank has a device", _problems(gpus)
        for layout in cases.trains(family):
            for rank in (0, 3):
                begin()
                torch.cuda.set_device(OWN)
                holdings_of(config, Train(**layout), rank, torch.bfloat16)
                yield f"{family} {cases.said(layout)} rank {rank}", _problems(gpus)


def _vllm(options: answers.Options, gpus: fake_gpus.FakeGpus) -> answers.Answers:
    import torch

    from hybrid3d.rollout.probe import trace_demand

    faults.inject(options.inject, "contexts")
    for _, name, recipe, rank in cases.rollout_cases(options.models, options.families):
        if rank == recipe.rollout.tp * recipe.rollout.dp - 1:
            gpus.forget()
            torch.cuda.set_device(OWN)
            trace_demand(recipe, cases.shapes_of(Path(recipe.model.path)), rank)
            yield name, _problems(gpus)


def _problems(gpus: fake_gpus.FakeGpus) -> list[str]:
    contexts = [f"a context on GPU {device}, {times} times" for device, times in gpus.contexts.items() if device != OWN]
    return contexts + [f"{nbytes} bytes on GPU {device}" for device, nbytes in gpus.nbytes.items()]


if __name__ == "__main__":
    answers.answer(check)

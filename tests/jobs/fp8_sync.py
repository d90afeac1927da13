"""One rank of the proof of FP8 syncs: vLLM's own loading of a checkpoint that was quantized whole is the truth.

    torchrun --nproc-per-node N fp8_sync.py OUT.json CASES.json

Each case has `bf16` and `fp8` checkpoints of the same weights, a `train` layout and vLLM's TP, `tp`. A first sync is
compared with what vLLM loads and computes. Then real updates follow, with a sync that overlaps the last of them, and is
compared with one that does not; and then, of changed elements only, with one of all elements.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch.distributed as dist

from delta_sync import Case, recipe_for
from hybrid3d import distributed, launch_environment
from hybrid3d.config import Train
from hybrid3d.train.megatron import runtime
from sync import Engine, Landed, compare, fresh


def prove(rank: int, case: dict, ident: str, kept: list) -> list[dict]:
    layout = Train(**case["train"])
    recipe = recipe_for(case["bf16"], layout, case["tp"], "fp8")
    slots = range(launch_environment.world_size())
    truth = fresh(recipe, rank, case["fp8"], f"{ident}-truth", slots)
    engine, landed, results = Engine(recipe, rank, ident, slots), Landed(), []
    kept += [engine, truth]  # an engine that is dropped takes the default process group with it
    for delta in ("never", "always"):
        runtime.initialize(layout, seed=1)
        settings = dataclasses.replace(recipe.sync, delta=delta)
        one = Case(case["bf16"], dataclasses.replace(recipe, sync=settings), rank, engine, landed)
        one.finish("first", compares=False)
        one.results[-1] |= {"loaded": compare(engine, landed, truth)}
        one.update(hook=one.hook)
        early = one.sync._early_bytes
        one.finish("overlapped" if delta == "never" else "changes")
        one.results[-1] |= {"early_bytes": early, "split": len(one.sync.source._split)}
        results += one.results
        for module in one.policy._modules:
            module.__dict__.clear()
        runtime.shutdown()
    return results


def main() -> None:
    out, cases = sys.argv[1:]
    distributed.start()
    kept: list = []
    results = [
        prove(launch_environment.rank(), case, f"{launch_environment.run_id()}-{number}", kept)
        for number, case in enumerate(json.loads(Path(cases).read_text()))
    ]
    everyone = distributed.gather_objects(results, dist.group.WORLD)
    if launch_environment.rank() == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()


if __name__ == "__main__":
    main()

"""One rank of the proof of adapter syncs: vLLM's own loading of the same files is the truth, and it judges nothing.

    torchrun --nproc-per-node 4 adapter_slots.py OUT.pt MODEL ADAPTERS ROLLOUT_TP LAYOUT.json

The adapters are synced to a vLLM that never reads the files, then again with B doubled. Then the same vLLM loads the
files itself, into the same slot.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from vllm.lora.request import LoRARequest

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Lora, Train, recipe_to_yaml
from hybrid3d.distributed import gather_objects
from hybrid3d.generation.engine import GenerationRequest, complete
from hybrid3d.inputs.models import read_config
from hybrid3d.rl.batch import Batch
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.sync import policy_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy
from sync import recipe_for

PROMPTS = [[5, 7, 11, 13, 17, 19, 23], [3, 4, 5, 6]]
ANSWER = 6


def slots_of(manager) -> dict[str, torch.Tensor]:
    return {
        f"{name}.{kind}.{number}": stacked.clone()
        for name, module in manager.modules.items()
        for kind in "ab"
        for number, stacked in enumerate(getattr(module, f"lora_{kind}_stacked"))
    }


def mismatch(engine: RolloutEngine, policy: Policy, recipe, version: int) -> float:
    """The largest difference between the engines' log-probabilities of what vLLM samples."""
    requests = [GenerationRequest(prompt, ANSWER, [], seed=version) for prompt in PROMPTS]
    answers = complete(engine, requests, version)
    rows = [[*prompt, *answer.tokens] for prompt, answer in zip(PROMPTS, answers, strict=True)]
    batch = Batch.from_sequences(rows, [len(prompt) for prompt in PROMPTS], pad_id=0)
    found = policy.logprobs(batch, recipe)
    if found is None:
        return 0.0
    pairs = zip(found, PROMPTS, answers, strict=True)
    return max(
        float((row[len(prompt) : len(prompt) + len(answer.tokens)] - torch.tensor(answer.logprobs)).abs().max())
        for row, prompt, answer in pairs
    )


@record
def main(out: str, model: str, adapters: str, rollout_tp: int, layout: str) -> None:
    group = distributed.start()
    rank, train = dist.get_rank(), Train(**json.loads(layout))
    runtime.initialize(train, seed=1)
    settings = json.loads((Path(adapters) / "adapter_config.json").read_text())
    recipe = dataclasses.replace(
        recipe_for(model, train, rollout_tp, "float32", 0.02),
        lora=Lora(
            rank=settings["r"],
            alpha=settings["lora_alpha"],
            path=adapters,
            target_modules=tuple(settings["target_modules"]),
        ),
    )
    policy = Policy(read_config(model), recipe, rank)
    engine = RolloutEngine(recipe, rank, launch_environment.run_id(), [*range(group.size())])
    sync = policy_sync(recipe, group, policy, engine)
    first = sync.run(0, verify=True)
    worker = engine.model_runner.lora_manager
    ours, difference = slots_of(worker._adapter_manager), mismatch(engine, policy, recipe, 0)
    assert policy.adapters is not None
    matrices = policy.adapters.tensors
    with torch.no_grad():
        for name, matrix in matrices.items():
            matrix.mul_(2 if ".lora_B." in name else 1)
    second = sync.run(1, verify=True)
    doubled, changed = slots_of(worker._adapter_manager), mismatch(engine, policy, recipe, 1)
    manager = worker._adapter_manager
    manager.remove_adapter(1)
    worker.add_adapter(LoRARequest("own", 7, adapters))
    assert manager.lora_index_to_id == [7]
    own = slots_of(manager)
    found = {
        "same": {name: torch.equal(ours[name], own[name]) for name in own},
        "doubled": all(torch.equal(doubled[n], own[n] * (2 if ".b." in n else 1)) for n in own),
        "nonzero": sum(int(tensor.count_nonzero()) for tensor in own.values()),
        "bytes": [(r.received_bytes, r.lower_bound_bytes) for r in (first, second)],
        "network_bytes": second.network_bytes,
        "recipe": recipe_to_yaml(recipe),
        "wanted": second.lower_bound_bytes,
        "held": {name: matrix.nbytes for name, matrix in matrices.items()},
        "slots": sum(tensor.nbytes for tensor in own.values()),
        "corrupted": [*first.corrupted, *second.corrupted],
        "mismatch": [difference, changed],
    }
    everything = gather_objects(found, group)
    if rank == 0:
        torch.save(everything, out)
    engine.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])

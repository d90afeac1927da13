"""One rank of the sync proof: real Megatron weights go into a real vLLM, and vLLM's own loading is the truth.

    torchrun --nproc-per-node 4 sync.py OUT.json ROLLOUT_TP DTYPE SLOTS FAMILY=FOLDER_A,FOLDER_B,FOLDER_C ...

For each family, vLLM loads checkpoints B and C itself, once each. Then, for each train layout, a vLLM that was started
with dummy weights is given A, B and C by three syncs and is compared after the second and the third; in the last layout
by twelve, and is compared after the last too. In all layouts but the last both engines share what memory they can. In
every second layout, the last one among them, the ranks of a node lend each other messages; in the others all are sent.
"""

import dataclasses
import itertools
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from faulty_transport import FlippedBits, use_faulty_transports
from hybrid3d import distributed, launch_environment
from hybrid3d.config import (
    Algorithm,
    Data,
    Machine,
    Model,
    Optimizer,
    Recipe,
    Rollout,
    Run,
    Sync,
    Train,
    recipe_to_yaml,
)
from hybrid3d.config.schema import is_due
from hybrid3d.families import family_of
from hybrid3d.reshard.files import load_files
from hybrid3d.reshard.plan.planner import Transfer
from hybrid3d.rl.batch import Batch
from hybrid3d.rollout import engine as rollout_engine
from hybrid3d.rollout import finalize as units
from hybrid3d.rollout.sink import DERIVED_PARAMETERS
from hybrid3d.sync import WeightSync, weight_sync
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.policy import Policy

SPARSE_LAYOUTS = [Train(dp=4, ep=4), Train(tp=2, pp=2, ep=2)]
PROMPT = torch.randint(3, 320, (100,), generator=torch.Generator().manual_seed(3)).tolist()


def dense_layouts(rollout_tp: int) -> list[Train]:
    """All pairs are proven in the grid, by value; here every kind at TP2, and elsewhere the two that differ most."""
    between = [Train(tp=2, dp=2), Train(pp=2, dp=2)] if rollout_tp == 2 else []
    return [Train(dp=4), *between, Train(tp=2, pp=2)]


def recipe_for(
    folder: str, train: Train, rollout_tp: int, dtype: str, bucket_mib: float, lends: str = "auto"
) -> Recipe:
    return Recipe(
        name="sync",
        model=Model(path=folder, dtype=dtype),
        train=dataclasses.replace(train, micro_batch_size=1),
        rollout=Rollout(tp=rollout_tp, max_model_len=128, max_new_tokens=8, kv_cache_gib=1 / 16),
        sync=Sync(bucket_mib=bucket_mib, shared_memory=lends),
        data=Data(train="-", eval="-"),
        algorithm=Algorithm(name="grpo", prompts_per_step=4, samples_per_prompt=2),
        optimizer=Optimizer(lr=1e-3),
        run=Run(steps=1),
        machine=Machine(gpus_per_node=2),
    )


class Engine(rollout_engine.RolloutEngine):
    """The rollout engine, and what can be seen of it."""

    @property
    def model(self) -> torch.nn.Module:
        return self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.model

    def logprobs(self) -> torch.Tensor:
        """Log-probabilities of a prompt's tokens, then of 4 greedy ones."""
        params = rollout_engine.SamplingParams(
            max_tokens=4, temperature=0, logprobs=0, prompt_logprobs=0, detokenize=False, ignore_eos=True
        )
        rng = torch.get_rng_state()
        output = self._llm.generate([{"prompt_token_ids": PROMPT}], [params], use_tqdm=False)[0]
        torch.set_rng_state(rng)
        prompt = [output.prompt_logprobs[i][PROMPT[i]].logprob for i in range(1, len(PROMPT))]
        answer = output.outputs[0]
        drawn = [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]
        return torch.tensor(prompt + drawn, dtype=torch.float64)

    @torch.no_grad()
    def outputs(self) -> dict[str, torch.Tensor]:
        """What each linear, embedding, head and sparse layer computes on fixed random inputs, as `module.kind`.

        The tensors that latent attention derives from `kv_b_proj` are kinds of their own.
        """
        from vllm.model_executor.layers.linear import LinearBase

        found, dtype = {}, next(self.model.parameters()).dtype
        for path, module in self.model.named_modules(remove_duplicate=False):
            method, random = getattr(module, "quant_method", None), torch.Generator().manual_seed(7)
            if hasattr(module, "num_embeddings_per_partition"):
                rows = torch.arange(module.num_embeddings_per_partition)
                found[f"{path}.embedding"] = method.embedding(module, rows)
                found[f"{path}.head"] = method.apply(
                    module, torch.randn(5, module.embedding_dim, generator=random).to(dtype)
                )
            elif isinstance(module, LinearBase):
                size = getattr(module, "input_size_per_partition", module.input_size)  # a replicated one is whole
                inputs = torch.randn(5, size, generator=random).to(module.params_dtype)
                found[f"{path}.linear"] = method.apply(module, inputs, module.bias)
            elif hasattr(module, "experts") and not hasattr(module, "layers"):
                found[f"{path}.block"] = self._block(module)
            derived = {name: getattr(module, name) for name in DERIVED_PARAMETERS if hasattr(module, name)}
            found |= {f"{path}.{name}": tensor.clone() for name, tensor in derived.items()}
        return found

    def _block(self, module: torch.nn.Module) -> torch.Tensor:
        """A sparse layer's experts, shared ones and router included, together with the other ranks of its TP."""
        from vllm.config import set_current_vllm_config
        from vllm.forward_context import set_forward_context

        config = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.vllm_config
        hidden = config.model_config.get_hidden_size()
        inputs = torch.randn(7, hidden, generator=torch.Generator().manual_seed(7)).to(config.model_config.dtype)
        with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=7):
            return module(inputs)

    def addresses(self) -> dict[str, int]:
        """Of what captured graphs would read: parameters, buffers, and tensors derived from them."""
        derived = {
            f"{path}.{name}": t
            for path, module in self.model.named_modules()
            for name, t in vars(module).items()
            if isinstance(t, torch.Tensor)
        }
        named = dict(self.model.named_parameters()) | dict(self.model.named_buffers()) | derived
        return {name: tensor.data_ptr() for name, tensor in named.items() if tensor.numel()}


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the first path of each module; tied tensors under each of their modules."""
    return {
        ".".join(part for part in (path, name) if part): tensor.detach().clone()
        for path, module in model.named_modules()
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]
        if tensor is not None
    }


def fresh(recipe: Recipe, rank: int, folder: str, ident: str, slots: list[int]) -> tuple:
    """What vLLM gets by loading a checkpoint itself: tensors before its processing, and what it computes after."""
    from vllm.model_executor.model_loader import base_loader

    before = {}
    process, real_llm = base_loader.process_weights_after_loading, rollout_engine.LLM

    def seen(model, *args):
        before.update(tensors_of(model))
        return process(model, *args)

    base_loader.process_weights_after_loading = seen
    rollout_engine.LLM = lambda **settings: real_llm(**{**settings, "load_format": "auto", "model": folder})
    try:
        engine = Engine(recipe, rank, ident, slots)
    finally:
        base_loader.process_weights_after_loading, rollout_engine.LLM = process, real_llm
    engine.weight_version = 0
    return engine, before, engine.outputs(), engine.logprobs()


class Landed:
    """Keeps what every unit holds, in loader layout, at the moment before it is finalized."""

    def __init__(self):
        self.tensors = {}
        finalize = units.OpenUnit.finalize

        def seen(opened, vllm_config):
            self.tensors.update({name: t.detach().clone() for name, t in opened.unit.tensors()})
            finalize(opened, vllm_config)

        units.OpenUnit.finalize = seen


class CountCollectives(TorchDispatchMode):
    """Bytes given to every operation of c10d, and calls of vLLM's shared-memory collectives.

    Attributes:
        borrowed: the bytes that were copied out of the memory of other ranks, by rank.
    """

    def __init__(self, sync: WeightSync):
        super().__init__()
        self._sync = sync
        self.bytes: dict[str, int] = {}
        self.borrowed: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("c10d::") or "shm" in name:
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, torch.Tensor)]
            self.bytes[name] = self.bytes.get(name, 0) + sum(t.nbytes for t in tensors)
        if name in ("aten::_foreach_copy_", "aten::copy_"):
            shared = self._sync.transport.shared_memory
            lenders = {} if shared is None else shared.borrowed  # whose memory is mapped where
            for source in args[1] if isinstance(args[1], list) else [args[1]]:
                lender = lenders.get(source.untyped_storage().data_ptr())
                if lender is not None:
                    self.borrowed[lender] = self.borrowed.get(lender, 0) + source.nbytes
        return func(*args, **(kwargs or {}))


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict:
    """How many elements were compared, and in which tensors some bit differs."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    wrong = [
        name
        for name in one
        if one[name].shape != other[name].shape or not torch.equal(_bits(one[name]), _bits(other[name]))
    ]
    return {"elements": sum(t.numel() for t in one.values()), "wrong": wrong}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def compare(engine: Engine, landed: Landed, truth: tuple) -> dict:
    _, before, outputs, logprobs = truth
    live, computed = tensors_of(engine.model), engine.outputs()
    assert live.keys() - before.keys() <= {n for n in live if n.endswith(DERIVED_PARAMETERS)}
    got = {name: landed.tensors[name] if name in landed.tensors else live[name] for name in before}
    return {
        "landed": len(landed.tensors),
        "loader_layout": differing(got, before),
        "outputs": differing(computed, outputs) | {"modules": by_kind(computed)},
        "logprobs": differing({"all": engine.logprobs()}, {"all": logprobs}),
    }


def by_kind(names: Iterable[str]) -> dict[str, list[str]]:
    """The modules whose outputs were compared."""
    found: dict[str, list[str]] = {}
    for module, _, kind in (name.rpartition(".") for name in names):
        found.setdefault(kind, []).append(module)
    return found


def matrices(sync: WeightSync) -> dict[str, list[str]]:
    """By name of each canonical matrix, the modules that it is written into."""
    found: dict[str, set[str]] = {}
    for piece in sync.sink.demand.pieces:
        if len(piece.box.size) == 2:
            found.setdefault(piece.name, set()).add(piece.view.tensor.rpartition(".")[0])
    return {name: sorted(modules) for name, modules in found.items()}


def split_boxes(sync: WeightSync, bucket_bytes: int) -> int:
    """Boxes, larger than a bucket, that this rank sends or receives in parts."""
    held, parts = defaultdict(list), defaultdict(list)
    for owners, side in sync.holders:
        for boxes, names in side.items():
            for at in itertools.product(owners, names):
                held[at] += [box for box, _ in boxes]
    for t in sync.plan.transfers:
        if t.src != t.dst and not t.relayed:
            source = next(box for box in held[t.src, t.name] if box.contains(t.box))
            parts[t.src, t.dst, t.name, source].append(t)
    return sum(len(of_box) > 1 and bytes_of_box(of_box) > bucket_bytes for of_box in parts.values())


def bytes_of_box(parts: list[Transfer]) -> int:
    """Bytes of the box that these parts fill, where they fill one."""
    low = [min(of_dim) for of_dim in zip(*(t.box.start for t in parts), strict=True)]
    high = [max(of_dim) for of_dim in zip(*(t.box.stop for t in parts), strict=True)]
    whole = math.prod(b - a for a, b in zip(low, high, strict=True))
    return sum(t.nbytes for t in parts) if whole == sum(t.box.numel for t in parts) else 0


def mismatch(policy: Policy, recipe: Recipe, engine: Engine) -> float | None:
    """The largest difference between what the two engines say of the prompt's tokens."""
    said = policy.logprobs(Batch.from_sequences([PROMPT], [1], pad_id=0), recipe)
    theirs = engine.logprobs()[: len(PROMPT) - 1]
    return None if said is None else (said[0, 1:].double() - theirs).abs().max().item()


def prove(
    rank: int, rollout_tp: int, dtype: str, slots: list[int], family: str, folders: list[str], kept: list
) -> list[dict]:
    config = json.loads((Path(folders[0]) / "config.json").read_text())
    layouts = SPARSE_LAYOUTS if family_of(config).experts(config) else dense_layouts(rollout_tp)
    base = recipe_for(folders[0], layouts[0], rollout_tp, dtype, 64)
    ident = f"{launch_environment.run_id()}-{family}"
    truths = [fresh(base, rank, folder, f"{ident}{i}", slots) for i, folder in enumerate(folders[1:])]
    engine, landed, results = Engine(base, rank, ident, slots), Landed(), []
    kept += [engine, *truths]  # an engine that is dropped takes the default process group with it
    for layout in layouts:
        runtime.initialize(layout, seed=1)
        # in the last of the layouts a bucket that is smaller than some boxes
        small = getattr(torch, dtype).itemsize / 40 / max(2, rollout_tp)
        last = layout is layouts[-1]
        lends = "auto" if layouts.index(layout) % 2 else "never"
        recipe = recipe_for(folders[0], layout, rollout_tp, dtype, small if last else 64, lends)
        policy = Policy(config, recipe, rank, trainable=False)
        weights, before = policy.weights, engine.addresses()
        sync = weight_sync(recipe, dist.group.WORLD, policy.source(), engine.sink())
        result = {"family": family, "dtype": dtype, "train": vars(layout), "rollout_tp": rollout_tp, "rank": rank}
        result["recipe"], result["slots"] = recipe_to_yaml(recipe), slots
        result["last"] = last
        result["bucket_bytes"] = int(recipe.sync.bucket_mib * 2**20)
        result["split_boxes"] = split_boxes(sync, result["bucket_bytes"])
        result["relayed_bytes"] = sum(t.nbytes for t in sync.plan.transfers if t.relayed and t.dst == rank)
        result["matrices"] = matrices(sync)
        for number in range(12 if result["last"] else 3):
            load_files(folders[number % 3], weights.demand, weights.tensors, rank)
            landed.tensors.clear()
            with CountCollectives(sync) as counted:
                report = sync.run(number, is_due(recipe.sync.verify, number))
            result |= {
                "report": vars(report) | {"expected": None, "of_engines": None},
                "c10d": counted.bytes,
                "borrowed": counted.borrowed,
            }
            if number in (1, 2, 11):
                result[f"sync{number}"] = compare(engine, landed, truths[number % 3 - 1])
        result["mismatch"] = mismatch(policy, recipe, engine)
        after = engine.addresses()
        result["moved"] = sorted(name for name in before if after.get(name) != before[name])
        with sync.transport.failing(FlippedBits(), sync.plan):
            sync.run(12, is_due(recipe.sync.verify, 12))
        result["corrupted"] = compare(engine, landed, truths[-1])
        results.append(result)
        runtime.shutdown()
    return results


def main() -> None:
    out, rollout_tp, dtype, placed, *cases = sys.argv[1:]
    slots = json.loads(placed)
    distributed.start()
    use_faulty_transports()
    results, kept = [], []
    for case in cases:
        family, _, folders = case.partition("=")
        results += prove(launch_environment.rank(), int(rollout_tp), dtype, slots, family, folders.split(","), kept)
    assert not counters["stats"]["unique_graphs"], "neither engine compiles on a CPU"
    everyone = [result for share in distributed.gather_objects(results, dist.group.WORLD) for result in share]
    if launch_environment.rank() == 0:
        Path(out).write_text(json.dumps(everyone))
    dist.barrier()


if __name__ == "__main__":
    main()

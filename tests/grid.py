"""The proof grid: train layouts x rollout layouts for every family, each proven by value in one process.

Holdings are read from the real Megatron model of every rank, demand is recorded from the real vLLM model of every
rank, and the plan is carried out. What vLLM then has is compared with what its own loader makes of the checkpoint.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from checkpoints import DENSE, FAMILIES, SPARSE
from hybrid3d.config import Algorithm, Data, Model, Optimizer, Recipe, Rollout, Run, Train
from hybrid3d.reshard.ends import NamedTensors
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.plan.classes import layer_of, rank_groups
from hybrid3d.reshard.plan.coverage import check_coverage, lower_bound, network_lower_bound
from hybrid3d.reshard.plan.layout import Demand, Fill, Holdings
from hybrid3d.reshard.plan.planner import Transfer, make_plan
from hybrid3d.rollout.probe import model_of_rank, slot_demands
from hybrid3d.rollout.sink import VllmSink
from hybrid3d.train.megatron.build import build_model
from hybrid3d.train.megatron.probe import holdings_of_all
from hybrid3d.train.megatron.runtime import as_rank
from hybrid3d.train.megatron.source import _shards, megatron_weights
from megatron_globals import global_tensor
from worlds import Mailbox, Strict, run_in_threads

from vllm.model_executor.layers.quantization.kv_cache import KVCacheScaleParameter  # isort: skip

RANKS_PER_NODE = 2

DENSE_TRAIN: list[dict[str, int]] = [
    dict(dp=4),
    dict(tp=2, dp=2),
    dict(tp=4),
    dict(pp=2, dp=2),
    dict(pp=4),
    dict(tp=2, pp=2),
    dict(tp=2, pp=2, vpp=2),
    dict(pp=2, vpp=2, dp=2),
    dict(pp=2, dp=2, first_stage_layers=1),
    dict(tp=2, pp=2, last_stage_layers=1),
    dict(tp=2, cp=2),
    dict(tp=4, pp=2),
    dict(tp=2, pp=4),
    dict(tp=2, pp=2, first_stage_layers=1),
    dict(pp=2, dp=2, last_stage_layers=1),
    dict(tp=4, pp=3, last_stage_layers=2),
    dict(tp=4, pp=2, first_stage_layers=1),
]
DENSE_ROLLOUT: list[dict[str, Any]] = [dict(tp=1), dict(tp=2), dict(tp=4)]
SPARSE_TRAIN: list[dict[str, int]] = [
    dict(dp=4, ep=2),
    dict(dp=4, ep=4),
    dict(tp=2, dp=2, ep=2),
    dict(tp=2, dp=2, ep=2, etp=2),
    dict(tp=4, ep=2, etp=2),
    dict(tp=2, pp=2),
    dict(tp=2, pp=2, ep=2, vpp=2),
    dict(pp=2, dp=2, ep=2, first_stage_layers=1),
    dict(tp=2, pp=2, dp=2, ep=4, last_stage_layers=1),
    dict(tp=2, cp=2, ep=2),
    dict(dp=4, ep=2, etp=2),
    dict(pp=4),
]
SPARSE_ROLLOUT: list[dict[str, Any]] = [
    dict(tp=1),
    dict(tp=2),
    dict(tp=4),
    dict(tp=2, expert_parallel=True),
    dict(tp=2, dp=2, expert_parallel=True),
    dict(tp=4, expert_parallel=True),
    dict(tp=1, dp=4, expert_parallel=True),
]
LAYOUTS = {
    **dict.fromkeys(DENSE, (DENSE_TRAIN, DENSE_ROLLOUT)),
    **dict.fromkeys(SPARSE, (SPARSE_TRAIN, SPARSE_ROLLOUT)),
}


@dataclass(frozen=True)
class Cell:
    family: str
    train: Train
    rollout: Rollout

    def __str__(self) -> str:
        sides = (self.train, Train(), ("micro_batch_size",)), (self.rollout, rollout_of(), ())
        said = [
            " ".join(f"{k}{v}" for k, v in vars(side).items() if k not in skipped and v != getattr(default, k))
            for side, default, skipped in sides
        ]
        return f"{self.family}: {said[0] or 'tp1'} -> {said[1] or 'tp1'}"


def rollout_of(**layout: Any) -> Rollout:
    return Rollout(max_model_len=128, max_new_tokens=8, **layout)


def cells(families: tuple[str, ...] = FAMILIES) -> Iterator[Cell]:
    for family in families:
        for train in LAYOUTS[family][0]:
            for rollout in LAYOUTS[family][1]:
                yield Cell(family, Train(**train), rollout_of(**rollout))


@dataclass(frozen=True)
class Proof:
    """What came of a cell.

    Attributes:
        elements: how many were compared.
        wrong: the ranks and tensors that differ.
        digest: of the set of (what a rank holds, what it wants): replicas of ranks do not change it.
        features: what is hard about the cell.
    """

    elements: int
    wrong: list[str]
    received_bytes: int
    lower_bound_bytes: int
    network_bytes: int
    network_bound_bytes: int
    digest: str
    features: frozenset[str]


@dataclass(frozen=True)
class MegatronModel:
    holdings: Holdings
    padding: tuple[Fill, ...]
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Wanted:
    demand: Demand
    truth: dict[str, torch.Tensor]


def far(t: Transfer) -> bool:
    """Return whether a transfer is between nodes."""
    return t.src // RANKS_PER_NODE != t.dst // RANKS_PER_NODE


class Judged(NamedTensors):
    """A sink whose tensors are compared with what they must be when their layer is closed.

    Attributes:
        wrong: those that differ, and those whose layer was never closed.
    """

    def __init__(self, truth: dict[str, torch.Tensor]):
        self._truth = truth
        self._got = {name: torch.full_like(tensor, float("nan")) for name, tensor in truth.items()}
        self.wrong = list(truth)
        super().__init__(self._got)

    def close(self, layer: int | None) -> None:
        for name, tensor in self._truth.items():
            if layer_of(name) == layer and torch.equal(_bits(tensor), _bits(self._got[name])):
                self.wrong.remove(name)


class Grid:
    """Asks the engines once per family and layout, and proves cells."""

    dtype = torch.float32

    def __init__(self, folder_of: Any):
        self._folder_of = folder_of
        self._weights = functools.cache(self._weights)
        self._wanted = functools.cache(self._wanted)
        self._trained = functools.lru_cache(1)(self._trained)  # cells come layout by layout
        self.prove = functools.cache(self.prove)

    def prove(self, cell: Cell, split: bool = False) -> Proof:
        """Sync a cell, on the ranks that train or, if `split`, from them to the ranks of two more engines."""
        trained = self._trained(cell.family, cell.train)
        engine = self._wanted(cell.family, cell.rollout)
        generating = range(len(trained), len(trained) + 2 * len(engine)) if split else range(len(trained))
        ranks = sorted({*trained, *generating})
        assert len(generating) % len(engine) == 0, str(cell)
        holdings = {rank: trained[rank].holdings for rank in trained}
        wanted = {rank: engine[i % len(engine)] for i, rank in enumerate(generating)}
        demand = {rank: wanted[rank].demand for rank in generating}
        plan = make_plan(holdings, demand, 100_000, RANKS_PER_NODE, relays=True)
        check_coverage(plan, holdings, demand)
        mailbox, sinks = Mailbox(), {rank: Judged(wanted[rank].truth) for rank in generating}

        def run(rank: int) -> int:
            source = NamedTensors(trained[rank].tensors if rank in trained else {})
            sink = sinks.get(rank, NamedTensors({}))
            for fill in demand[rank].fills if rank in demand else ():
                sink.fill(fill)
            with mailbox.failing_together():
                return Executor(plan[rank], source, sink, Strict(rank, mailbox)).run().received_bytes

        received = run_in_threads(run, ranks)
        wrong = [f"rank {rank}: {name}" for rank in generating for name in sinks[rank].wrong]
        elements = sum(t.numel() for rank in generating for t in wanted[rank].truth.values())
        least = sum(lower_bound(holdings, demand).values())
        network = sum(t.nbytes for part in plan.values() for t in part.transfers if t.dst == part.rank and far(t))
        network_bound = sum(network_lower_bound(rank_groups(holdings), rank_groups(demand), RANKS_PER_NODE).values())
        digest, features = _digest(holdings, demand), self._features(cell)
        return Proof(elements, wrong, sum(received), least, network, network_bound, digest, features)

    def _features(self, cell: Cell) -> frozenset[str]:
        """What is hard about a cell, as its layouts, the checkpoint's config and both engines say."""
        train, rollout = cell.train, cell.rollout
        config, _ = self._weights(cell.family)
        trained, engine = self._trained(cell.family, train).values(), self._wanted(cell.family, rollout)
        held = {piece.name for rank in trained for piece in rank.holdings.pieces}
        keys = Counter(  # by how many of the ranks that share one attention each key is wanted
            key
            for rank in engine[: rollout.tp]
            for key in {(p.name, p.box) for p in rank.demand.pieces if p.name.endswith("k_proj.weight")}
        )
        there = {
            "VPP": train.vpp > 1,
            "uneven PP stages": bool(train.first_stage_layers or train.last_stage_layers),
            "EP": train.ep > 1,
            "ETP": train.etp > 1,
            "ETP larger than TP": train.etp > train.tp,
            "CP": train.cp > 1,
            "expert-parallel rollout": rollout.expert_parallel,
            "expert-parallel rollout over DP": rollout.expert_parallel and rollout.dp > 1,
            "tied embeddings": config["tie_word_embeddings"],
            "fewer query groups than TP": config["num_key_value_heads"] < train.tp,
            "replicated KV heads": max(keys.values(), default=1) > 1,
            "vocabulary padded by Megatron": any(rank.padding for rank in trained),
            "vocabulary padded by vLLM": any(rank.demand.fills for rank in engine),
            "router bias": any(name.endswith("e_score_correction_bias") for name in held),
        }
        return frozenset(name for name, is_there in there.items() if is_there)

    def unlike_the_whole(self, cell: Cell) -> list[str]:
        """Where one layer of each kind, repeated, says something else than the engines say of all their layers."""
        trained, engine = self._trained(cell.family, cell.train), self._wanted(cell.family, cell.rollout)
        config, weights = self._weights(cell.family)
        recipe = self._recipe(cell.family, cell.train, cell.rollout)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        holdings, slots = holdings_of_all(config, recipe), slot_demands(config, recipe, shapes)
        assert holdings.keys() == trained.keys()
        assert len(slots) == len(engine)
        held = [f"rank {rank} holds" for rank in trained if holdings[rank] != trained[rank].holdings]
        wanted = [f"slot {slot} wants" for slot, one in enumerate(slots) if one.demand != engine[slot].demand]
        return held + wanted

    def _recipe(self, family: str, train: Train, rollout: Rollout) -> Recipe:
        return Recipe(
            name="grid",
            model=Model(path=str(self._folder_of(family))),
            train=train,
            rollout=rollout,
            data=Data(train="-", eval="-"),
            algorithm=Algorithm(name="grpo", prompts_per_step=8, samples_per_prompt=2),
            optimizer=Optimizer(lr=1e-3),
            run=Run(steps=1),
        )

    def _weights(self, family: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        folder = Path(self._folder_of(family))
        files = sorted(folder.glob("*.safetensors"))
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        return json.loads((folder / "config.json").read_text()), weights

    def _checkpoint(self, family: str) -> dict[str, torch.Tensor]:
        """The tensors of the checkpoint that vLLM loads."""
        return self._weights(family)[1]

    def _trained(self, family: str, layout: Train) -> dict[int, MegatronModel]:
        """By rank: what Megatron says it holds, and tensors filled where Megatron says, not where our tables do."""
        config, weights = self._weights(family)
        found, world = {}, layout.tp * layout.pp * layout.cp * layout.dp
        for rank in range(world):
            with as_rank(rank, layout, world):
                stages = build_model(config, layout, self.dtype, meta=True)
                tensors: dict[str, torch.Tensor] = {}
                for local, base, shard in _shards(stages):
                    real = tensors.setdefault(local, torch.zeros(base.shape, dtype=base.dtype))
                    offset = shard.data.storage_offset() - base.storage_offset()
                    view = real.as_strided(shard.data.shape, shard.data.stride(), offset)
                    _fill(view, shard, global_tensor(shard.key, weights, config))
                held = megatron_weights(stages, config)
                found[rank] = MegatronModel(held.holdings, held.padding, tensors)
        return found

    def _wanted(self, family: str, rollout: Rollout) -> list[Wanted]:
        """By rank of one engine: what vLLM's loader asks for, and what it makes of the checkpoint itself."""
        weights = self._checkpoint(family)
        recipe = self._recipe(family, Train(dp=rollout.tp * rollout.dp), rollout)
        shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
        found = []
        for rank in range(rollout.tp * rollout.dp):
            with model_of_rank(recipe, rank) as (model, config):
                demand = VllmSink(model, config).demand_for(shapes)
            with model_of_rank(recipe, rank, device="cpu") as (model, _):
                model.load_weights(iter(weights.items()))
                tensors = dict(model.named_parameters()) | dict(model.named_buffers())
            names = {p.view.tensor for p in demand.pieces} | {
                name for name, p in model.named_parameters() if not isinstance(p, KVCacheScaleParameter)
            }
            found.append(Wanted(demand, {name: tensors[name].detach().clone() for name in sorted(names)}))
        return found


def _fill(view: torch.Tensor, shard: Any, whole: torch.Tensor) -> None:
    """Write what Megatron says lies there; rows beyond the vocabulary are padding."""
    front = shard.prepend_axis_num
    for axis in range(front):
        whole = whole[shard.global_offset[axis]]
    assert whole.dim() == view.dim(), shard.key
    index = tuple(slice(a, a + n) for a, n in zip(shard.global_offset[front:], view.shape, strict=True))
    part = whole[index]
    view[tuple(slice(0, n) for n in part.shape)].copy_(part)


def _digest(holdings: dict[int, Holdings], demand: dict[int, Demand]) -> str:
    pairs = {repr((holdings.get(rank), demand.get(rank))) for rank in {*holdings, *demand}}
    return hashlib.sha256("\n".join(sorted(pairs)).encode()).hexdigest()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)

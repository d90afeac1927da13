"""The rounds of a certification on one rank: change the weights, sync, and compare with vLLM's own loading."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d import distributed, launch_environment
from hybrid3d.bench.values import SyntheticWeights
from hybrid3d.certify.findings import Findings, join
from hybrid3d.config import Recipe
from hybrid3d.generation.engine import Completion, GenerationRequest
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.delta.encoding import Changes, pack_bits
from hybrid3d.reshard.ends import NamedTensors, PlainSource
from hybrid3d.reshard.file_index import read_index
from hybrid3d.reshard.files import CheckpointReader, file_pieces, load_files
from hybrid3d.rl.batch import Batch
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.rollout.inspection import FreshModel, Inspection
from hybrid3d.run.health import MAX_EXPLAINED_MISMATCH
from hybrid3d.sync import CorruptSync, weight_sync
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.source import MegatronWeights
from hybrid3d.trainer.export import write_export

CHANGED_FRACTION = 0.05  # of the elements in a round whose sync sends only those
STANDARD_ERRORS = 2  # by which a mean may be off
RELATIVE, ABSOLUTE = 0.05, 0.002  # the largest change of an element: a part of its value, and of those that are 0


class NoisyWeights:
    """A rank's weights in Megatron; what `ChangeTracker` is in a run (`reshard.ends.ChangeSource`).

    They change by noise that is the same on every rank that holds an element. Only bfloat16 tensors are tracked, as in
    a run.
    """

    complete = True

    def __init__(self, weights: MegatronWeights):
        self._weights = weights
        self._bits = {
            name: pack_bits(torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device))
            for name, tensor in self._tracked().items()
        }
        self._changed = 0

    @torch.no_grad()
    def change(self, number: int, fraction: float) -> None:
        """Change this fraction of the elements of every tensor; the noise depends on the number."""
        before = {name: tensor.detach().clone() for name, tensor in self._tracked().items()}
        source = NamedTensors(self._weights.tensors)
        noise, chosen = SyntheticWeights(number), SyntheticWeights(0, number, fraction)
        for piece in self._weights.holdings.pieces:
            tensor = source.read(piece)
            for part, values in noise.values(piece.name, piece.box, torch.float32, tensor.device):
                there = source.read(piece.restrict(part))
                values = there.float() * (1 + RELATIVE * values) + ABSOLUTE * values
                mask = chosen.changed(f"{piece.name}/{number}", part, tensor.device)
                there.copy_(torch.where(mask, values.to(there.dtype), there))
        for name, old in before.items():
            differs = (old.view(torch.int16) != self._weights.tensors[name].detach().view(torch.int16)).flatten()
            self._bits[name] |= pack_bits(differs)
            self._changed += int(differs.sum())

    def _tracked(self) -> Mapping[str, torch.Tensor]:
        return {name: t for name, t in self._weights.tensors.items() if t.dtype is torch.bfloat16}

    @property
    def elements(self) -> int:
        return sum(tensor.numel() for tensor in self._tracked().values())

    def bitmaps(self) -> Changes:
        return self._bits

    def check(self) -> bool:
        return True

    def count_changed(self) -> int:
        return self._changed

    def clear(self) -> None:
        self._changed = 0
        for bits in self._bits.values():
            bits.zero_()


class Certification:
    """Both engines of a rank, and the rounds between them. Every rank calls every method together.

    Attributes:
        findings: of this rank.
        deltas: the rounds whose sync sent only the changed elements.
        dense_reasons: why the syncs that were to do so sent everything.
    """

    def __init__(self, recipe: Recipe, folder: Path, group: dist.ProcessGroup, slots: Sequence[int]):
        self._recipe, self._group, self._folder = recipe, group, folder
        config = read_config(recipe.model.path)
        self._policy = Policy(config, recipe, group.rank(), trainable=False)
        self._engine = RolloutEngine(recipe, group.rank(), launch_environment.run_id(), slots)
        self._inspection = Inspection(self._engine)
        self._weights = NoisyWeights(self._policy.weights)
        held = self._policy.weights
        source = PlainSource(held.tensors, held.holdings, changes=self._weights)
        self._sync = weight_sync(recipe, group, source, self._engine.sink())
        self._requests = prompts_of(config["vocab_size"], recipe)
        assert recipe.rollout is not None
        # vLLM 0.32 crashes on a CPU where ranks share experts
        self._computes = not recipe.rollout.expert_parallel or torch.cuda.is_available()
        self.findings = Findings()
        self.deltas: list[int] = []
        self.dense_reasons: list[str] = []
        self.mismatch = 0.0
        self.rounds = 0

    def run(self, rounds: int, print_status: Callable[[str], object]) -> None:
        """Run so many more rounds, or up to the first in which something is wrong on any rank."""
        last = self.rounds + rounds
        while self.rounds < last:
            print_status(f"round {self.rounds + 1} of {last}")
            self._run_round(self.rounds)
            self.rounds += 1
            if any(distributed.gather_objects(self.findings.any_wrong, self._group)):
                return

    def _run_round(self, number: int) -> None:
        wants_delta = number % 2 == 1
        self._engine.sleep()
        if number:
            self._weights.change(number, CHANGED_FRACTION if wants_delta else 1.0)
        self._engine.wake("weights")
        if not wants_delta:
            self._sync.require_dense()
        try:
            report = self._sync.run(number, verify=True)
        except CorruptSync as error:
            self.findings.count("verification", 1, 0, [str(error)])
            return
        self._engine.wake("kv_cache")
        self.findings.count("verification", len(self._sync.sink.demand.pieces), report.received_bytes, report.corrupted)
        if wants_delta:
            self.dense_reasons += [report.dense_reason] if report.dense_reason else []
            self.deltas += [] if report.dense_reason else [number]
        # Before anything drops the prefix cache of older weights
        live = self._inspection.answers(self._requests) if self._computes else []
        exported = self._export()
        if number == 0:
            self._compare_with_source(exported)
        self._compare_export(exported)
        fresh = self._inspection.load_fresh(exported)
        self.findings.compare(
            "weights", self._inspection.contents(self._inspection.model), self._inspection.contents(fresh.model)
        )
        if self._computes:
            self._compare_modules(fresh)
            self._compare_answers(live, fresh)
            self._compare_engines(live)
        dist.barrier(self._group)
        if self._group.rank() == 0:
            shutil.rmtree(exported)

    def _export(self) -> Path:
        out = self._folder / "exported"
        if self._group.rank() == 0:
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir(parents=True)
        dist.barrier(self._group)
        write_export(self._policy, self._recipe.model.path, out, self._group)
        return out

    def _compare_with_source(self, exported: Path) -> None:
        """Compare what was loaded and exported with the checkpoint's files, rounded to the dtype that Megatron has."""
        here = {piece.name: piece.dtype for piece in self._policy.weights.pieces}
        dtypes = {name: dtype for held in distributed.gather_objects(here, self._group) for name, dtype in held.items()}
        source, entries = read_index(self._recipe.model.path), read_index(exported)
        rank, ranks = self._group.rank(), self._group.size()
        with CheckpointReader(self._recipe.model.path, source) as old, CheckpointReader(exported, entries) as new:
            for piece in file_pieces(entries)[rank::ranks]:
                values = old.read(piece)
                if piece.name in dtypes:
                    values = values.to(getattr(torch, dtypes[piece.name]))
                values = values.to(getattr(torch, piece.dtype))
                self.findings.compare("load", {piece.name: new.read(piece)}, {piece.name: values})

    def _compare_export(self, exported: Path) -> None:
        """Read the exported files as a new run would, and compare each piece with Megatron's."""
        weights = self._policy.weights
        loaded = {name: torch.zeros_like(tensor) for name, tensor in weights.tensors.items()}
        load_files(exported, weights.demand, loaded, self._group.rank())
        held, read = NamedTensors(weights.tensors), NamedTensors(loaded)
        for piece in weights.pieces:
            self.findings.compare("export", {piece.name: read.read(piece)}, {piece.name: held.read(piece).detach()})

    def _compare_modules(self, fresh: FreshModel) -> None:
        inspection = self._inspection
        live_outputs = inspection.outputs(inspection.model)
        with inspection.using(fresh):
            fresh_outputs = inspection.outputs(fresh.model)
        self.findings.compare("modules", live_outputs, fresh_outputs)

    def _compare_answers(self, live: Sequence[Completion], fresh: FreshModel) -> None:
        inspection = self._inspection
        inspection.forget()
        with inspection.using(fresh):
            expected = inspection.answers(self._requests)
        wrong = []
        for number, (one, other) in enumerate(zip(live, expected, strict=True)):
            if one.tokens != other.tokens or one.logprobs != other.logprobs:
                where = f"prompt {number} of {len(self._requests[number].prompt_ids)} tokens"
                wrong.append(f"{where}: {describe_answers(one, other)}")
        self.findings.count("answers", sum(len(one.tokens) for one in expected), 0, wrong)

    def _compare_engines(self, live: Sequence[Completion]) -> None:
        """Compare Megatron's log-probabilities of rank 0's answers with vLLM's."""
        answers: list[Completion] = distributed.broadcast_object(list(live), self._group)
        prompts = [list(request.prompt_ids) for request in self._requests]
        rows = [prompt + list(answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
        batch = Batch.from_sequences(rows, [len(prompt) for prompt in prompts], pad_id=0)
        said = self._policy.logprobs(batch, self._recipe)
        if said is None:
            return
        differences = [
            (said[row, len(prompt) : len(prompt) + len(answer.tokens)].double().cpu() - torch.tensor(answer.logprobs))
            for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        differing = torch.cat(differences).abs()
        mean, dtype = differing.mean().item(), self._recipe.model.dtype
        # Of so few tokens: a router that rounding lets choose another expert changes some of them by much
        error = differing.std().item() / differing.numel() ** 0.5
        bound = MAX_EXPLAINED_MISMATCH[dtype][self._policy.has_experts]
        self.mismatch = max(self.mismatch, mean)
        problem = f"log-probabilities differ by {mean:.4g} nats on average (standard error {error:.2g}), and {dtype}"
        wrong = [] if mean - STANDARD_ERRORS * error <= bound else [f"{problem} explains at most {bound:g}"]
        self.findings.count("engines", differing.numel(), 0, wrong)

    def result(self) -> dict[str, Any]:
        """Return what all ranks have found; equal on every rank."""
        every = distributed.gather_objects(self.findings.as_json(), self._group)
        mismatch = max(distributed.gather_objects(self.mismatch, self._group))
        pieces = self._sync.sink.demand.pieces
        sparse = sum(piece.nbytes for piece in pieces if piece.name in self._sync.sparse)
        sizes = distributed.gather_objects((sum(piece.nbytes for piece in pieces), sparse), self._group)
        return {
            "rounds": self.rounds,
            "deltas": len(self.deltas),
            "dense_reasons": sorted(set(self.dense_reasons)),
            "wanted_bytes": sum(wanted for wanted, _ in sizes),
            "sparse_bytes": sum(sparse for _, sparse in sizes),
            "mismatch": mismatch,
            "checks": join(every),
        }

    def close(self) -> None:
        """Shut vLLM down, which destroys the process groups."""
        dist.barrier(self._group)
        self._engine.close()


def describe_answers(live: Completion, fresh: Completion) -> str:
    """Return where two answers to a prompt, which are not equal, first differ."""
    pairs = zip(live.tokens, live.logprobs, fresh.tokens, fresh.logprobs, strict=False)
    for at, (token, logprob, other, other_logprob) in enumerate(pairs):
        if (token, logprob) != (other, other_logprob):
            had = f"token {token} at {logprob:.6g} instead of token {other} at {other_logprob:.6g}"
            return f"the answer's token {at} is {had}"
    return f"the answer has {len(live.tokens)} tokens instead of {len(fresh.tokens)}"


def prompts_of(vocabulary: int, recipe: Recipe) -> list[GenerationRequest]:
    """Return prompts, the same in each round, of which the longest fill blocks of the prefix cache."""
    assert recipe.rollout is not None
    source, new_tokens = random.Random(1), recipe.rollout.max_new_tokens
    longest = recipe.rollout.max_model_len - new_tokens
    lengths = [longest, longest // 2 + 1, min(17, longest), 1]
    return [
        GenerationRequest([source.randrange(vocabulary) for _ in range(length)], new_tokens, [], seed=number)
        for number, length in enumerate(lengths)
    ]

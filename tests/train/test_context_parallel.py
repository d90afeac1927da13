"""Context parallelism: losses, gradient norms and weights of several updates are those of one rank per sequence."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from commands import demo_folder, hybrid3d, read_rows
from hybrid3d.config import RecipeError, load_recipe
from reference import ADAM, BIAS_RATE, make_inputs, save_classifier, tensors_in
from run_ranks import ROOT, run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

LEARNING_RATE = 2e-3
WITH_CRITIC = ("qwen3",)  # of the quick ones
PACKED = {"packed": True, "max_tokens_per_micro_batch": 96}
TWO_RANKS: dict[str, dict[str, Any]] = {
    "whole": dict(dp=2),  # what all others must equal
    "cp2": dict(cp=2),
    "cp2-packed": dict(cp=2, **PACKED),
    "cp2-ep2-packed": dict(cp=2, ep=2, router_replay="old", **PACKED),
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "whole": dict(dp=4),
    "cp4": dict(cp=4),
    "cp4-packed": dict(cp=4, **PACKED),
    "cp4-budget": dict(cp=4, max_tokens_per_micro_batch=96),
    "cp4-ep4": dict(cp=4, ep=4, router_replay="old", recompute="full"),
    "cp2-dp2": dict(cp=2, dp=2, recompute="full"),
    "cp2-dp2-packed": dict(cp=2, dp=2, **PACKED),
    "cp2-dp2-ep2": dict(cp=2, dp=2, ep=2),
    "tp2-cp2": dict(tp=2, cp=2),
    "tp2-cp2-packed": dict(tp=2, cp=2, router_replay="old", **PACKED),
    "tp2-cp2-ep2-etp2": dict(tp=2, cp=2, ep=2, etp=2, router_replay="old", **PACKED),
    "pp2-cp2": dict(pp=2, cp=2),
    "pp2-cp2-packed": dict(pp=2, cp=2, **PACKED),
    "pp2-cp2-budget": dict(pp=2, cp=2, max_tokens_per_micro_batch=96),
    "pp2-cp2-vpp2": dict(pp=2, cp=2, vpp=2, packed=True, recompute="full"),
}
DENSE_LAYOUTS = (
    *("whole", "cp4", "cp4-packed", "cp4-budget", "cp2-dp2", "cp2-dp2-packed"),
    *("tp2-cp2", "pp2-cp2", "pp2-cp2-packed", "pp2-cp2-budget", "pp2-cp2-vpp2"),
)
SPARSE_LAYOUTS = (
    *("whole", "cp4", "cp4-packed", "cp4-ep4", "cp2-dp2-ep2", "tp2-cp2-packed", "tp2-cp2-ep2-etp2"),
    *("pp2-cp2-packed", "pp2-cp2-vpp2"),
)
CASES: dict[str, dict[str, tuple[str, ...]]] = {  # layouts of families; all of one key in one launch
    "quick": {
        "qwen3": ("whole", "cp2", "cp2-packed"),
        "qwen3_moe": ("whole", "cp2-ep2-packed"),
        "deepseek_v3": ("whole", "cp2-packed"),
    },
    "dense": {"qwen2": DENSE_LAYOUTS},
    "experts": {"qwen3_moe": SPARSE_LAYOUTS},
    "latent": {"deepseek_v3": SPARSE_LAYOUTS},
}

RESUMED: dict[str, dict[str, tuple[str, ...]]] = {  # the layouts in which a checkpoint of the first one is read
    "quick": {"qwen3": ("cp2-packed", "whole")},
    "dense": {"qwen2": ("cp4", "cp2-dp2", "whole")},
    "experts": {"qwen3_moe": ("whole", "cp2-dp2-ep2", "pp2-cp2-packed")},
    "latent": {"deepseek_v3": ("cp2-dp2-ep2", "cp4", "whole")},
}


class Results:
    """What the ranks wrote down, and which layouts of which families there are."""

    def __init__(self, folder: Path, kind: str):
        self.folder = folder
        self._layouts = TWO_RANKS if kind == "quick" else FOUR_RANKS
        self._ranks = self._layouts["whole"]["dp"]
        self.resumed = RESUMED[kind]
        self.cases = [(family, name) for family, names in CASES[kind].items() for name in names if name != "whole"]

    def of(self, family: str, layout: str, what: str) -> list[Any]:
        """By rank."""
        names = [f"{family}-{layout}-rank{rank}.pt" for rank in range(self._ranks)]
        return [torch.load(self.folder / name, weights_only=False)[what] for name in names]

    def start(self, family: str) -> str:
        return torch.load(self.folder / "inputs.pt", weights_only=False)["checkpoints"][family]["start"]

    def has_critic(self, family: str) -> bool:
        return (self.folder / f"{family}-classifier").exists()

    def replicas(self, layout: str) -> int:
        return self._layouts[layout].get("dp", 1)


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=[] if kind == "quick" else [pytest.mark.slow]) for kind in CASES],
)
def results(request, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Results:
    kind, out, checkpoints = request.param, tmp_path_factory.mktemp("context"), {}
    for family in CASES[kind]:
        checkpoints[family] = {"start": str(tiny_checkpoint(family, 1))}
        if family in WITH_CRITIC or kind != "quick":
            checkpoints[family]["classifier"] = str(out / f"{family}-classifier")
            save_classifier(tiny_checkpoint(family, 1), out / f"{family}-classifier")
    layouts = TWO_RANKS if kind == "quick" else FOUR_RANKS
    cases = [(family, layout) for family, names in CASES[kind].items() for layout in names]
    settings = dict(micro_batch_size=4, expert_bias_update_rate=BIAS_RATE)
    work = {"checkpoints": checkpoints, "cases": cases, "layouts": layouts, "settings": settings}
    work |= {"resumed": RESUMED[kind]}
    torch.save(make_inputs() | work | {"optimizer": {**ADAM, "lr": LEARNING_RATE}}, out / "inputs.pt")
    job = ROOT / "tests/jobs/context_parallel.py"
    run_ranks(job, layouts["whole"]["dp"], [str(out / "inputs.pt"), str(out)], timeout=500)
    return Results(out, kind)


def sums_of(reports: list[dict[str, Any]]) -> dict[str, float]:
    return {
        key: sum(report["sums"][key] for report in reports if report["is_reporting_rank"])
        for key in next(report["sums"] for report in reports if report["sums"])
    }


def rows_of(reports: list[dict[str, Any]], key: str, width: int = 24) -> torch.Tensor:
    """What the reporting ranks have of all rows, in the order of the batch."""
    shares = {r["rows"].start: r[key] for r in reports if r["is_reporting_rank"]}
    padded = [torch.nn.functional.pad(s, (0, width - s.shape[-1])) for _, s in sorted(shares.items())]
    return torch.cat(padded, dim=-2)


def test_updates_equal_those_of_whole_sequences(results: Results) -> None:
    for family, layout in results.cases:
        whole, shared = (results.of(family, name, "updates") for name in ("whole", layout))
        for step in range(len(whole[0])):
            expected, found = [rank[step] for rank in whole], [rank[step] for rank in shared]
            where = family, layout, step
            assert sum(r["is_reporting_rank"] for r in found) == results.replicas(layout), where
            assert sums_of(found) == pytest.approx(sums_of(expected), rel=1e-5, abs=1e-5), where
            norm = expected[0]["grad_norm"]
            assert norm > 0.1
            assert [r["grad_norm"] for r in found] == pytest.approx([norm] * len(found), rel=1e-5), where
            within = 1e-4 if step == 0 else 1e-3  # of float64's attention it is up to 2e-4 in the third
            assert torch.allclose(rows_of(found, "scores"), rows_of(expected, "scores"), rtol=1e-5, atol=within), where


def test_weights_equal_those_of_whole_sequences(results: Results) -> None:
    for family, layout in results.cases:
        expected, found = (tensors_in(results.folder / f"{family}-{name}") for name in ("whole", layout))
        before = tensors_in(results.start(family))
        assert found.keys() == expected.keys() == before.keys()
        assert max((found[name] - before[name]).abs().max() for name in before) > LEARNING_RATE
        for name, tensor in found.items():
            assert (tensor - expected[name]).abs().max() <= 1e-5, (family, layout, name)


def test_critic_and_scores_equal_those_of_whole_sequences(results: Results) -> None:
    for family, layout in filter(lambda case: results.has_critic(case[0]), results.cases):
        whole, shared = (results.of(family, name, "critic") for name in ("whole", layout))
        for step in range(len(whole[0])):
            expected, found = [rank[step] for rank in whole], [rank[step] for rank in shared]
            assert sums_of(found) == pytest.approx(sums_of(expected), rel=1e-5), (family, layout, step)
            norm = expected[0]["grad_norm"]
            assert [r["grad_norm"] for r in found] == pytest.approx([norm] * len(found), rel=1e-5)
        scores = torch.zeros(16)
        for rank in results.of(family, "whole", "values"):
            scores[rank["rows"]] = rank["scores"]
        for rank in results.of(family, layout, "values"):
            assert (rank["scores"] is not None) == rank["has_output"]
            if rank["has_output"]:  # on every rank that shares sequences
                assert (rank["scores"] - scores[rank["rows"]]).abs().max() <= 1e-4, (family, layout)


def test_checkpoint_is_read_in_other_layouts(results: Results) -> None:
    for family, (first, *others) in results.resumed.items():
        whole = results.of(family, "resumed", first)
        for layout in others:
            found = results.of(family, "resumed", layout)
            assert sums_of(found) == pytest.approx(sums_of(whole), rel=1e-5, abs=1e-5), (family, layout)
            norm = whole[0]["grad_norm"]
            assert [r["grad_norm"] for r in found] == pytest.approx([norm] * len(found), rel=1e-5), (family, layout)


def test_gpus_need_an_attention_for_it() -> None:
    """Transformer Engine's, which is not installed here."""
    from hybrid3d.inputs.checks import _check_transformer_engine

    path = ROOT / "recipes/demo-cpu.yaml"
    _check_transformer_engine(load_recipe(path, []))
    with pytest.raises(RecipeError) as raised:
        _check_transformer_engine(load_recipe(path, ["train.cp=2"]))
    missing, dtype = raised.value.problems
    assert missing.startswith("train.cp=2: on GPUs context parallelism needs the attention of Transformer Engine")
    assert dtype.startswith("train.cp=2: on GPUs context parallelism needs model.dtype=bfloat16, not float32: set it,")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_run_learns_from_the_same_answers(demo: Path, tmp_path: Path) -> None:
    """Through both engines, with every sync verified; recorded steps are done again bit for bit, or without sharing."""
    demo_folder(tmp_path, demo)
    (tmp_path / "rewards.py").write_text(
        "def parity(answer, reference, prompt):\n    return float(sum(answer.encode()) % 2)\n"
    )
    settings = [str(ROOT / "recipes/demo-cpu.yaml"), "model.path=build/demo/base", "train.tp=1", "train.pp=1"]
    settings += ["rollout.tp=1", "rollout.kv_cache_gib=0.0625", "sync.verify=always", "reward.name=rewards:parity"]
    settings += ["run.steps=3", "run.eval_every=9", "run.record=always", "train.micro_batch_size=8"]
    settings += ["algorithm.prompts_per_step=8", "algorithm.samples_per_prompt=4"]
    hybrid3d(tmp_path, "train", *settings, "name=whole", "train.dp=2", also=tmp_path)
    hybrid3d(tmp_path, "train", *settings, "name=shared", "train.cp=2", "train.packed=true", also=tmp_path)
    whole, shared = (read_rows(tmp_path / "runs" / name) for name in ("whole", "shared"))
    assert len(shared) == 4
    for row in shared:
        assert row["sync/received_bytes"] == row["sync/lower_bound_bytes"]
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
    for key in ("train/loss", "train/grad_norm", "train/entropy", "reward/mean", "mismatch/kl"):
        assert shared[0][key] == pytest.approx(whole[0][key], rel=1e-4, abs=1e-6), key
    for layout, same in (([], True), (["train.cp=1", "train.dp=2"], False)):
        hybrid3d(tmp_path, "replay", "runs/shared", "--step", "2", *layout)
        found = json.loads((tmp_path / "runs/shared/replay/step-000002.json").read_text())
        assert (found["as_recorded"], found["same_layout"]) == (True, same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 3])
def test_attention_over_ranks_equals_torchs(ranks: int, dtype: torch.dtype) -> None:
    """Its output and gradients, for several sequences, with values narrower than keys; ranks are threads."""
    random = torch.Generator().manual_seed(7)
    lengths, batch, heads, groups = [2 * ranks, 8 * ranks, 6 * ranks], 2, 4, 2
    shapes = {"query": (heads, 32), "key": (groups, 32), "value": (groups, 24), "weights": (heads, 24)}
    given = {
        name: torch.randn(sum(lengths), batch, *shape, generator=random).to(dtype) for name, shape in shapes.items()
    }
    weights = given.pop("weights")
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    parts = zip(*(leaf.split(lengths) for leaf in leaves.values()), strict=True)
    out = [scaled_dot_product_attention(*map(heads_first, part), is_causal=True, enable_gqa=True) for part in parts]
    expected = torch.cat([one.permute(2, 0, 1, 3) for one in out])
    expected_gradients = torch.autograd.grad((expected * weights).sum(), list(leaves.values()))
    limit = 2e-6 if dtype is torch.float32 else 4e-2

    def run(group: dist.ProcessGroup) -> None:
        from hybrid3d.train.megatron.context import context_attention, context_shard

        own = context_shard(torch.tensor(lengths), group).own
        shares = [tensor[own].requires_grad_() for tensor in given.values()]
        found = context_attention(*shares, [length // ranks for length in lengths], group, None)
        assert (found - expected[own]).abs().max() <= limit
        gradients = torch.autograd.grad((found * weights[own]).sum(), shares)
        for gradient, whole in zip(gradients, expected_gradients, strict=True):
            assert (gradient - whole[own]).abs().max() <= limit

    in_threads(run, ranks)


def heads_first(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.permute(1, 2, 0, 3)


def in_threads(run: Callable[[Any], None], ranks: int) -> None:
    """Call `run` on each rank of a gloo group whose ranks are threads of this process."""
    store = dist.HashStore()

    def call(rank: int) -> None:
        group = dist.ProcessGroup(store, rank, ranks)
        backend = dist.ProcessGroupGloo(dist.PrefixStore("context", store), rank, ranks)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        run(group)

    with ThreadPoolExecutor(ranks) as pool:
        list(pool.map(call, range(ranks)))

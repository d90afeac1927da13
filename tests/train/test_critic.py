"""The critic and the reward model against transformers' classifiers and plain PyTorch, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from reference import (
    BIAS_RATE,
    SFT,
    make_inputs,
    save_classifier,
    tensors_in,
    true_scores,
    true_value_step,
)
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

LAYOUTS: dict[str, dict[str, int]] = {
    "tp2-pp2": dict(tp=2, pp=2),
    "tp2-pp2-packed": dict(tp=2, pp=2, packed=True),
    "dp4": dict(dp=4),
    "tp4": dict(tp=4),
    "tp2-pp2-vpp2": dict(tp=2, pp=2, vpp=2),
    "tp2-pp2-ep2": dict(tp=2, pp=2, ep=2),
    "tp2-ep2": dict(tp=2, dp=2, ep=2),
}
DENSE_LAYOUTS, SPARSE_LAYOUTS = ("dp4", "tp4", "tp2-pp2-vpp2"), ("tp2-pp2", "dp4", "tp2-pp2-ep2", "tp2-ep2")
QUICK = [("qwen2", "tp2-pp2"), ("deepseek_v3", "tp2-pp2-packed")]  # tied embeddings; a sequence split over TP
SLOW = [
    *((family, layout) for family in ("qwen2", "llama", "qwen3") for layout in DENSE_LAYOUTS),
    *((family, layout) for family in ("qwen3_moe", "mixtral", "deepseek_v3") for layout in SPARSE_LAYOUTS),
]


class Results:
    """What the ranks wrote down."""

    def __init__(self, checkpoints: dict[str, dict[str, str]], folder: Path):
        self.checkpoints, self.folder = checkpoints, folder

    def of(self, name: str, what: str) -> list[Any]:
        """By rank."""
        return [torch.load(self.folder / f"{name}-rank{rank}.pt", weights_only=False)[what] for rank in range(4)]


@pytest.fixture(
    scope="module", params=[pytest.param(QUICK, id="quick"), pytest.param(SLOW, id="slow", marks=[pytest.mark.slow])]
)
def results(request, tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Results:
    out, checkpoints = tmp_path_factory.mktemp("critic"), {}
    for family in dict(request.param):
        start, classifier = tiny_checkpoint(family, 1), out / f"{family}-classifier"
        save_classifier(start, classifier)
        checkpoints[family] = {"start": str(start), "classifier": str(classifier)}
    settings = dict(micro_batch_size=2, expert_bias_update_rate=BIAS_RATE)
    work = {"checkpoints": checkpoints, "cases": request.param, "layouts": LAYOUTS, "settings": settings}
    torch.save(make_inputs() | work, out / "inputs.pt")
    run_ranks(Path(__file__).parents[1] / "jobs" / "critic.py", 4, [str(out / "inputs.pt"), str(out)], timeout=500)
    found = Results(checkpoints, out)
    found.cases = request.param
    return found


def assert_values(ranks: list[Any], what: str, true: torch.Tensor) -> None:
    """Ranks with the output layer say what is true of their rows, and no others say anything."""
    assert {row for r in ranks if r["has_output"] for row in range(16)[r["rows"]]} == set(range(16))
    for rank in ranks:
        assert (rank[what] is not None) == rank["has_output"]
        if rank["has_output"]:
            assert rank[what].dtype == torch.float32
            expected = true[rank["rows"]]
            if expected.dim() == 2:
                expected = expected[:, : rank[what].shape[1]]
            assert (rank[what] - expected).abs().max() <= 1e-4


def test_values_and_scores_equal_transformers(results: Results) -> None:
    for family, layout in results.cases:
        folder, ranks = results.checkpoints[family]["classifier"], results.of(f"{family}-{layout}", "frozen")
        true = true_value_step(folder, steps=0, fresh=False)[2]
        assert true.abs().max() > 0.5
        assert_values(ranks, "values", true)
        assert_values(ranks, "scores", true_scores(folder))


def test_reward_model_on_ranks_of_its_own_equals_transformers(results: Results) -> None:
    """On four ranks, TP2 x PP2, for samples that are not whole micro batches."""
    true = true_scores(results.checkpoints[results.cases[0][0]]["classifier"])[:13]
    for scores in results.of("apart", "scores"):
        assert torch.tensor(scores) == pytest.approx(true, abs=1e-4)


def assert_reports(reports: list[Any], loss: float, norm: float) -> None:
    inputs = make_inputs()
    tokens = sum(len(row) - prompt for row, prompt in zip(inputs["sequences"], inputs["prompts"], strict=True))
    total = sum(report["sums"]["loss"] for report in reports if report["is_reporting_rank"])
    assert total / tokens == pytest.approx(loss, rel=1e-5)
    assert all(report["grad_norm"] == pytest.approx(norm, rel=1e-5) for report in reports)


def test_step_equals_plain_pytorch(results: Results) -> None:
    for family, layout in results.cases:
        folder, name = results.checkpoints[family]["classifier"], f"{family}-{layout}"
        losses, norms, _, weights = true_value_step(folder, steps=1, fresh=False)
        assert norms[0] > SFT["clip_grad"]
        assert_reports(results.of(name, "step"), losses[0], norms[0])
        before, after = tensors_in(folder), tensors_in(results.folder / name)
        assert after.keys() == before.keys() >= {"score.weight"}
        for key, tensor in after.items():
            assert (tensor - weights[key]).abs().max() <= 1e-5, key
            if not torch.equal(weights[key], before[key]):  # an expert that got no token stays
                assert (tensor - before[key]).abs().max() > 5e-5, key


def test_head_that_the_checkpoint_lacks_starts_at_zero(results: Results) -> None:
    for family, layout in results.cases:
        name = f"{family}-{layout}"
        losses, norms, values, _ = true_value_step(results.checkpoints[family]["start"], steps=2, fresh=True)
        first, last = zip(*results.of(name, "fresh"), strict=True)
        assert_values(list(first), "values", torch.zeros(16, 25))
        assert_values(list(last), "values", values)
        for step in range(2):
            assert_reports([steps[step] for steps in results.of(name, "fresh steps")], losses[step], norms[step])


def test_policy_and_critic_share_a_checkpoint(results: Results) -> None:
    """Saved at TP2 x PP2, read at PP2 x DP2; the values of the weights that were saved are those after one step."""

    def losses(what: str) -> list[float]:
        of_ranks = results.of("resume", what)
        return [
            sum(rank[model]["sums"]["loss"] for rank in of_ranks if rank[model]["is_reporting_rank"])
            for model in range(2)
        ]

    assert losses("resumed") == pytest.approx(losses("went on"), rel=1e-5)
    went_on, resumed = results.of("resume", "went on")[0], results.of("resume", "resumed")[0]
    assert [r["grad_norm"] for r in resumed] == pytest.approx([r["grad_norm"] for r in went_on], rel=1e-5)
    folder = results.checkpoints[results.cases[0][0]]["start"]
    assert_values(results.of("resume", "frozen"), "values", true_value_step(folder, steps=1, fresh=True)[2])


def test_head_of_several_labels_is_refused(tmp_path: Path, tiny_checkpoint: Callable[..., Path]) -> None:
    from transformers import AutoModelForSequenceClassification

    from hybrid3d.inputs.models import read_config
    from hybrid3d.reshard.file_index import CheckpointError
    from hybrid3d.train.megatron.value_model import ValueModel

    model = AutoModelForSequenceClassification.from_pretrained(tiny_checkpoint("qwen3"), num_labels=2)
    model.save_pretrained(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"score.weight has shape \[2, 128\], a value of a token takes \[1, 128\]"
    ):
        ValueModel(read_config(tmp_path), None, 0, path=str(tmp_path))

"""Updates with answers of data, `sft` and `dpo`, on real ranks in several layouts, against plain PyTorch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybrid3d.rl.data import epoch_order
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

STEPS, PAIRS, HELD_OUT, SEED = 3, 4, 6, 1
OPTIMIZER = dict(lr=2e-3, eps=1e-2, clip_grad=0.5)  # a large eps makes the first updates depend on the gradient's size
SFT = dict(name="sft", prompts_per_step=2 * PAIRS)
DPO = dict(name="dpo", prompts_per_step=PAIRS, preference=dict(beta=0.5, label_smoothing=0.1, sft_coef=0.2))
SIMPO = dict(name="dpo", prompts_per_step=PAIRS, preference=dict(loss_type="simpo", beta=2.0, simpo_gamma=0.7))
# The longest sequence has 30 tokens; a budget of 60 makes several micro batches of two or three sequences.
PACKED, BUDGET = dict(packed=True, max_tokens_per_micro_batch=60), dict(max_tokens_per_micro_batch=60)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft-padded": (dict(dp=4, micro_batch_size=2), SFT),
    "sft-packed": (dict(tp=2, pp=2, **PACKED), SFT),
    "dpo-padded": (dict(dp=4, micro_batch_size=1), DPO),  # no micro batch has both sequences of a pair
    "dpo-packed": (dict(tp=2, pp=2, **PACKED), DPO),
}
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sft-packed-dp": (dict(pp=2, dp=2, **PACKED), SFT),
    "dpo-packed-interleaved": (dict(tp=2, pp=2, vpp=2, **PACKED), DPO),
    "dpo-budget": (dict(pp=2, dp=2, **BUDGET), DPO),
    "simpo-packed": (dict(tp=2, dp=2, packed=True, micro_batch_size=2), SIMPO),
}


def write_pairs(demo: Path, folder: Path) -> None:
    """Write pairs whose answers have several lengths; those of training have answers for `sft` too."""
    rows = pq.read_table(demo / "preferences.parquet").slice(0, 64 + HELD_OUT).to_pylist()
    for i, row in enumerate(rows):
        row["chosen"] += " ####" * (i % 4)
        row["rejected"] += " more apples" * (i % 5)
        row["answer"] = row["chosen"]
    pq.write_table(pa.Table.from_pylist(rows[:64]), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[64:]), folder / "eval.parquet")


def run_cases(demo: Path, folder: Path, cases: dict[str, Any]) -> Path:
    """Train in each of the cases, with four ranks that are started once, and return the folder with what they found."""
    write_pairs(demo, folder)
    files = {"train": str(folder / "train.parquet"), "eval": str(folder / "eval.parquet")}
    spec = {
        "model": str(demo / "base"),
        "data": {"sft": files, "dpo": files},
        "optimizer": OPTIMIZER,
        "steps": STEPS,
        "cases": cases,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    job = Path(__file__).parents[1] / "jobs" / "data_updates.py"
    run_ranks(job, 4, [str(folder / "spec.json"), str(folder / "out.json")], timeout=300)
    return folder


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(demo, tmp_path_factory.mktemp("data-updates"), CASES)


@pytest.fixture(scope="module")
def more(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_cases(demo, tmp_path_factory.mktemp("more-data-updates"), MORE)


class Plain:
    """The same training by transformers and plain PyTorch, a sequence at a time, the formulas written out once more."""

    def __init__(self, model: Path):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(
            self._policy.parameters(), lr=OPTIMIZER["lr"], eps=OPTIMIZER["eps"], weight_decay=0.0
        )

    def logprob(self, model: Any, question: str, answer: str) -> tuple[Tensor, int]:
        """The log-probability of an answer and EOS, and the number of its tokens."""
        prompt, text = (self._tokenizer.encode(one, add_special_tokens=False) for one in (question, answer))
        tokens = torch.tensor([*prompt, *text, self._tokenizer.eos_token_id])
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        of_tokens = logprobs.gather(-1, tokens[1:, None]).squeeze(-1)
        return of_tokens[len(prompt) - 1 :].sum(), len(text) + 1

    def sft_loss(self, rows: Sequence[dict[str, str]]) -> Tensor:
        found = [self.logprob(self._policy, row["question"], row["answer"]) for row in rows]
        return -sum(logprob for logprob, _ in found) / sum(count for _, count in found)

    def pair(self, row: dict[str, str], settings: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, int]:
        """The loss of a pair, the margin of rewards, the chosen answer's log-probability and number of tokens."""
        rewards, chosen, count = [], None, 0
        for column in ("chosen", "rejected"):
            logprob, tokens = self.logprob(self._policy, row["question"], row[column])
            if column == "chosen":
                chosen, count = logprob, tokens
            if settings.get("loss_type") == "simpo":
                rewards.append(settings["beta"] * logprob / tokens)
            else:
                with torch.no_grad():
                    reference, _ = self.logprob(self._reference, row["question"], row[column])
                rewards.append(settings["beta"] * (logprob - reference))
        margin = rewards[0] - rewards[1]
        logit, smoothing = margin - settings.get("simpo_gamma", 0.0), settings.get("label_smoothing", 0.0)
        return -(1 - smoothing) * logsigmoid(logit) - smoothing * logsigmoid(-logit), margin, chosen, count

    def dpo_loss(self, rows: Sequence[dict[str, str]], settings: dict[str, Any]) -> tuple[Tensor, dict[str, float]]:
        losses, margins, chosen, counts = zip(*(self.pair(row, settings) for row in rows), strict=True)
        margin = torch.stack(margins).detach()
        means = {
            "loss": torch.stack(losses).mean().item(),
            "margin": margin.mean().item(),
            "accuracy": (margin > 0).float().mean().item(),
            "chosen_logprob": torch.stack(chosen).mean().item(),
        }
        nll = -torch.stack(chosen).sum() / sum(counts)
        return torch.stack(losses).mean() + settings.get("sft_coef", 0.0) * nll, means

    def update(self, loss: Tensor) -> float:
        """Update the policy, and return the norm of the gradient."""
        self._optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._policy.parameters(), OPTIMIZER["clip_grad"])
        self._optimizer.step()
        return float(norm)


@cache
def expected(work: Path, model: Path, kind: str) -> dict[str, Any]:
    """What the ranks should have measured with an algorithm: by step, and of the held-out pairs after training."""
    plain, settings = Plain(model), {"sft": SFT, "dpo": DPO, "simpo": SIMPO}[kind]
    data, held_out = (pq.read_table(work / f"{name}.parquet").to_pylist() for name in ("train", "eval"))
    order, size, rows = epoch_order(len(data), SEED, 0), settings["prompts_per_step"], []
    for step in range(STEPS):
        of_step = [data[i] for i in order[step * size : (step + 1) * size]]
        if kind == "sft":
            loss, means = plain.sft_loss(of_step), {}
        else:
            loss, means = plain.dpo_loss(of_step, settings["preference"])
        wanted = {f"preference/{name}": value for name, value in means.items() if name != "loss"}
        rows.append({"train/loss": loss.item(), "grad_norm": plain.update(loss), **wanted})
    if kind == "sft":
        return {"rows": rows, "held_out": {}}
    with torch.no_grad():
        _, means = plain.dpo_loss(held_out, settings["preference"])
    return {"rows": rows, "held_out": {f"eval/preference_{name}": value for name, value in means.items()}}


def check(work: Path, demo: Path, case: str) -> None:
    found, wanted = json.loads((work / "out.json").read_text())[case], expected(work, demo / "base", case.split("-")[0])
    for row, of_step in zip(found["rows"], wanted["rows"], strict=True):
        for key, value in of_step.items():
            assert row[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    for key, value in wanted["held_out"].items():
        assert found["held_out"][key] == pytest.approx(value, rel=1e-5, abs=1e-5), key


@pytest.mark.parametrize("case", CASES)
def test_updates_are_those_of_plain_pytorch(work: Path, demo: Path, case: str) -> None:
    check(work, demo, case)


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE)
def test_updates_in_more_layouts(more: Path, demo: Path, case: str) -> None:
    check(more, demo, case)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_packed_equals_padded(work: Path, kind: str) -> None:
    found = json.loads((work / "out.json").read_text())
    for padded, packed in zip(found[f"{kind}-padded"]["rows"], found[f"{kind}-packed"]["rows"], strict=True):
        assert packed == pytest.approx(padded, rel=1e-5, abs=1e-5)


def test_margin_rises(work: Path) -> None:
    margins = [row["preference/margin"] for row in json.loads((work / "out.json").read_text())["dpo-packed"]["rows"]]
    assert margins[0] == pytest.approx(0.0, abs=1e-5)  # of the policy, which is the reference
    assert margins == sorted(margins)
    assert margins[-1] > 0.05

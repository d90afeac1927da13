"""Runs with adapters through the real commands: train, resume, eval, both exports; PEFT reads the export."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from commands import EXPERTS, ROOT, experts_folder, hybrid3d, read_rows, warm_checkpoint
from hybrid3d.config import load_recipe
from hybrid3d.errors import UserMistake
from hybrid3d.inputs.adapters import check_adapters
from live_runs import child_of, recorded, started, wait_for_rows, wait_until
from reference import model_of, tensors_in

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(1500)]

APART = ("train.pp=1", "train.tp=2", "roles.generation.ranks=2", "rollout.tp=1")


def settings(name: str, *more: str) -> list[str]:
    short = ["run.steps=3", "run.checkpoint_every=2", "algorithm.prompts_per_step=8", "rollout.max_new_tokens=8"]
    lora = ["lora.rank=2", "lora.alpha=8", "optimizer.lr=5e-3", "sync.verify=always", "algorithm.kl.where=loss"]
    return [str(ROOT / "recipes/demo-cpu.yaml"), f"name={name}", "model.path=warm", *short, *lora, *more]


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = warm_checkpoint(tmp_path_factory.mktemp("adapters-run"), demo)
    hybrid3d(folder, "train", *settings("slots"))
    hybrid3d(folder, "export", "runs/slots", "peft")
    hybrid3d(folder, "export", "runs/slots", "merged", "--merged")
    return folder


def test_sync_sends_only_adapters(work: Path) -> None:
    rows = read_rows(work / "runs/slots")
    first, *later = (row["sync/received_bytes"] for row in rows)
    assert all(row["sync/received_bytes"] == row["sync/lower_bound_bytes"] for row in rows)
    assert len(set(later)) == 1
    assert 0 < later[0] < first / 4
    assert all(row["mismatch/logprob_abs_max"] <= 1e-4 for row in rows)
    assert rows[0]["train/kl"] == 0  # B is 0
    assert rows[2]["train/kl"] > 0


def test_peft_and_transformers_read_the_exports(work: Path) -> None:
    from peft import PeftModel

    tokens = torch.randint(3, 100, (2, 30), generator=torch.Generator().manual_seed(1))
    base, merged = model_of(work / "warm"), model_of(work / "merged")
    with torch.no_grad():
        before, wanted = base(tokens).logits, merged(tokens).logits
        found = PeftModel.from_pretrained(base, work / "peft")(tokens).logits
    assert (before - wanted).abs().max() > 1e-3
    assert (found - wanted).abs().max() <= 1e-4


def test_resumed_run_ends_with_the_same_adapters(work: Path) -> None:
    shutil.rmtree(work / "runs/slots/checkpoints/step-000003")
    hybrid3d(work, "train", *settings("slots"))
    hybrid3d(work, "export", "runs/slots", "resumed")
    wanted, found = tensors_in(work / "peft"), tensors_in(work / "resumed")
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_run_begins_with_adapters_of_peft(work: Path) -> None:
    hybrid3d(work, "train", *settings("continued", "lora.path=peft", "run.steps=1"))
    row, end = read_rows(work / "runs/continued")[0], read_rows(work / "runs/slots")[-1]
    assert row["eval/accuracy"] == end["eval/accuracy"]
    assert row["train/kl"] > 0  # the reference is the model without them


def test_merged_weights_compute_the_same(work: Path) -> None:
    hybrid3d(work, "train", *settings("sums", "lora.sync=merged"))
    pairs = zip(read_rows(work / "runs/sums"), read_rows(work / "runs/slots"), strict=True)
    for sums, slots in pairs:
        assert sums["mismatch/logprob_abs_max"] <= 1e-4
        assert sums["reward/mean"] == slots["reward/mean"]
    hybrid3d(work, "train", *settings("apart", "lora.sync=merged", "train.pp=1", "roles.generation.ranks=2"))
    assert all(row["mismatch/logprob_abs_max"] <= 1e-4 for row in read_rows(work / "runs/apart"))


def test_ranks_that_only_generate_get_the_adapters_alone(work: Path) -> None:
    """Each of two engines gets each matrix once in a sync, and nothing else; the run is as on ranks that do both."""
    hybrid3d(work, "train", *settings("engines", *APART))
    first, *later = read_rows(work / "runs/engines")
    engines = 2
    alone = engines * sum(matrix.nbytes for matrix in tensors_in(work / "peft").values())
    assert [row["sync/received_bytes"] for row in later] == [alone] * len(later)
    assert first["sync/received_bytes"] == first["sync/lower_bound_bytes"] > 4 * alone
    for apart, together in zip([first, *later], read_rows(work / "runs/slots"), strict=True):
        assert apart["mismatch/logprob_abs_max"] <= 1e-4
        assert apart["reward/mean"] == together["reward/mean"]
        if "train/grad_norm" in together:  # not in the last row, which is of the evaluation at the end
            assert apart["train/grad_norm"] == pytest.approx(together["train/grad_norm"], rel=1e-3)


def test_engine_that_was_lost_gets_the_weights_below_adapters_again(work: Path) -> None:
    run, events = work / "runs/shaken", work / "runs/shaken/events.jsonl"
    more = ("run.steps=999", "run.checkpoint_every=0", "run.eval_every=1000")
    with started(work, settings("shaken", *APART, *more)) as process:
        wait_for_rows(run, 3, process)
        child = child_of(run, 3)
        assert child is not None
        os.kill(child, signal.SIGKILL)
        wait_until(lambda: "engine_joined" in events.read_text(), process)
        (run / "control.yaml").write_text(f"run.steps: {recorded(run) + 3}\n")
        process.communicate(timeout=300)
        assert process.returncode == 0
    rows = read_rows(run)
    assert all(row["mismatch/logprob_abs_max"] <= 1e-4 for row in rows)
    received = [row["sync/received_bytes"] for row in rows]
    assert received[0] > 4 * received[1]
    # In the first sync, in that without the lost engine, and in that with the new one
    assert sum(of_step > received[0] / 4 for of_step in received) == 3


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_adapters_of_experts(demo: Path, tmp_path: Path, family: str) -> None:
    experts_folder(tmp_path, demo, family)
    more = [*EXPERTS, "lora.sync=merged", "train.ep=2", "run.steps=1"]
    hybrid3d(tmp_path, "train", *settings("experts", *more))
    assert all(row["mismatch/logprob_abs_max"] <= 1e-3 for row in read_rows(tmp_path / "runs/experts"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["lora.target_modules=[q_proj,wq]"],
            "lora.target_modules: this model has no linear layer wq: it has down_proj",
        ),
        (["lora.path=peft", "lora.rank=4"], "lora.rank=4: peft/adapter_config.json has r=2: set lora.rank=2"),
        (["lora.path=warm"], "warm/adapter_config.json cannot be read"),
        (["lora.path=peft", "lora.target_modules=[q_proj]"], "has matrices that it does not select, 48 of them"),
        (["train.expert_bias_update_rate=0.1"], "changes routers, and with lora all but the adapters"),
    ],
)
def test_mistakes_are_told(work: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], said: str) -> None:
    monkeypatch.chdir(work)
    path, *others = settings("refused", *overrides)
    with pytest.raises(UserMistake) as told:
        check_adapters(load_recipe(Path(path), others))
    assert said in " ".join(str(told.value).split())

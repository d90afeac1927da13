"""Layers for multi-token prediction, trained by Megatron, equal plain PyTorch; the policy beside them is unchanged."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from commands import EXPERTS, ROOT, experts_folder, hybrid3d, read_rows
from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.inputs.checks import check_model
from hybrid3d.inputs.models import read_config
from hybrid3d.launch.preflight import check_weights
from hybrid3d.reshard.file_index import CheckpointError
from mtp_reference import LAYERS, TrueStep, make_mtp_checkpoint, true_mtp_step
from reference import BIAS_RATE, make_inputs, tensors_in
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600), pytest.mark.usefixtures("one_thread")]

COEF, CLIP = 0.3, 0.05
MTP = f"model.layers.{LAYERS}."
BIAS = f"{MTP}mlp.gate.e_score_correction_bias"
COPIES = {f"{MTP}embed_tokens.weight": "model.embed_tokens.weight", f"{MTP}shared_head.head.weight": "lm_head.weight"}
PACKED = {"packed": True, "max_tokens_per_micro_batch": 71}
CASES: dict[str, tuple[str, int, dict[str, dict[str, Any]]]] = {
    "quick": ("deepseek_v3", 2, {"tp2-ep2": dict(tp=2, ep=2), "pp2-packed": dict(pp=2, **PACKED)}),
    "alone": ("deepseek_v3", 1, {"alone": {}, "recompute": dict(recompute="full")}),
    "four": (
        "deepseek_v3",
        4,
        {
            "tp2-pp2-ep2-packed": dict(tp=2, pp=2, ep=2, **PACKED),
            "tp2-pp2-etp2-vpp2": dict(tp=2, pp=2, etp=2, vpp=2, recompute="full"),
            "pp4": dict(pp=4, max_tokens_per_micro_batch=71),
            "dp4-ep4": dict(dp=4, ep=4, router_replay="old"),
            "tp2-dp2-ep2-etp2-packed": dict(tp=2, dp=2, ep=2, etp=2, **PACKED),
        },
    ),
    "glm": ("glm4_moe", 4, {"tp2-pp2": dict(tp=2, pp=2, ep=2), "dp2-pp2": dict(dp=2, pp=2, ep=2)}),
    "moonlight": ("moonlight", 2, {"tp2": dict(tp=2, ep=2, recompute="full", **PACKED)}),
}


@dataclasses.dataclass(frozen=True)
class Results:
    """What the ranks of a case wrote down."""

    folder: Path
    ranks: int
    layouts: dict[str, dict[str, Any]]

    @property
    def whole(self) -> dict[str, dict[str, Any]]:
        """Layouts in which no two ranks have the same weights, so that each has all of their gradients."""
        return {name: layout for name, layout in self.layouts.items() if layout.get("dp", 1) == 1}

    @property
    def true(self) -> TrueStep:
        return true_mtp_step(self.folder / "source")

    def of(self, layout: str, what: str) -> list[Any]:
        return [torch.load(self.folder / f"{layout}-rank{rank}.pt")[what] for rank in range(self.ranks)]

    def reports(self, layout: str, what: str, step: int = 0) -> list[dict[str, Any]]:
        """By rank that reports."""
        return [found[step] for found in self.of(layout, what) if found[step]["is_reporting_rank"]]

    def tensors(self, layout: str, what: str) -> dict[str, torch.Tensor]:
        return tensors_in(self.folder / layout / what)


@pytest.fixture(
    scope="module", params=[pytest.param(case, marks=[] if case == "quick" else [pytest.mark.slow]) for case in CASES]
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return results_of(tmp_path_factory.mktemp("mtp"), *CASES[request.param])


def results_of(
    out: Path, family: str, ranks: int, layouts: dict[str, dict[str, Any]], dtype: str = "float32"
) -> Results:
    source = make_mtp_checkpoint(out / "source", family, seed=1)
    work = {"layouts": layouts, "source": str(source), "coef": COEF, "clip_grad": CLIP, "dtype": dtype}
    torch.save(make_inputs() | work, out / "inputs.pt")
    run_ranks(Path(__file__).parents[1] / "jobs" / "mtp.py", ranks, [str(out / "inputs.pt"), str(out)], timeout=500)
    return Results(out, ranks, layouts)


def num_answer_tokens() -> int:
    inputs = make_inputs()
    return sum(len(row) - prompt for row, prompt in zip(inputs["sequences"], inputs["prompts"], strict=True))


def test_loss_and_gradients_equal_plain_pytorch(results: Results) -> None:
    true, tokens = results.true, num_answer_tokens()
    for layout in results.layouts:
        loss = sum(report["sums"]["mtp_loss"] for report in results.reports(layout, "mtp")) / tokens
        assert abs(loss - true.loss) <= 1e-5 * true.loss, layout
    norm = COEF * true.norm
    assert norm > CLIP
    for layout in results.whole:
        found = results.tensors(layout, "mtp-gradients")
        assert {name for name in found if name.startswith(MTP)} - {BIAS} == {*true.gradients, *COPIES}
        for name, gradient in true.gradients.items():
            assert gradient.abs().max() > 0, name
            assert (found[name] - COEF * gradient * CLIP / norm).abs().max() <= 1e-5 * CLIP, (layout, name)


@pytest.mark.slow
def test_mtp_in_bfloat16_differs_only_by_rounding(tmp_path: Path) -> None:
    results = results_of(tmp_path, "deepseek_v3", 2, {"pp2": dict(pp=2), "tp2-ep2": dict(tp=2, ep=2)}, "bfloat16")
    start, true = tensors_in(tmp_path / "source"), results.true
    for layout in results.layouts:
        (report,) = results.reports(layout, "mtp")
        assert report["sums"]["mtp_loss"] / num_answer_tokens() == pytest.approx(true.loss, rel=0.02)
        gradients, without = (results.tensors(layout, f"{what}-gradients") for what in ("mtp", "plain"))
        found, expected = (torch.cat([g[n].flatten() for n in true.gradients]) for g in (gradients, true.gradients))
        assert torch.cosine_similarity(found, expected, dim=0) > 0.8  # it sends some tokens to other experts
        trained, plain_trained, resumed = (
            results.tensors(layout, what) for what in ("mtp-trained", "plain-trained", "resumed")
        )
        for name, tensor in trained.items():
            assert torch.equal(tensor, resumed[name]), name
            if not name.startswith(MTP):
                assert torch.equal(gradients[name], without[name]), name
                assert torch.equal(tensor, plain_trained[name]), name
            elif name.endswith("_proj.weight"):  # steps of norms, which are near 1, are rounded away
                assert not torch.equal(tensor, start[name].bfloat16().float()), name


def test_policy_is_updated_as_without_it(results: Results) -> None:
    for layout in results.layouts:
        for step in range(2):
            plain, found = (results.reports(layout, what, step) for what in ("plain", "mtp"))
            for with_mtp, without in zip(found, plain, strict=True):
                assert with_mtp["sums"].keys() - without["sums"].keys() == {"mtp_loss"}
                assert abs(with_mtp["grad_norm"] - without["grad_norm"]) <= 1e-6 * without["grad_norm"]
                assert without["grad_norm"] > CLIP
                if layout in results.whole:
                    assert with_mtp["grad_norm"] == without["grad_norm"]
                    assert with_mtp["sums"]["loss"] == without["sums"]["loss"]
                    assert torch.equal(with_mtp["logprobs"], without["logprobs"])
        for kind in ("gradients", "trained") if layout in results.whole else ("trained",):
            plain, found = (results.tensors(layout, f"{what}-{kind}") for what in ("plain", "mtp"))
            names = [name for name in plain if not name.startswith(MTP)]
            assert names
            for name in names:
                if layout in results.whole:
                    assert torch.equal(found[name], plain[name]), (layout, name)
                else:  # where shards of the optimizer begin decides how the gradient's norm is rounded
                    assert (found[name] - plain[name]).abs().max() <= 1e-6, (layout, name)


def test_layouts_train_the_layer_alike(results: Results) -> None:
    start = tensors_in(results.folder / "source")
    found = {layout: results.tensors(layout, "mtp-trained") for layout in results.layouts}
    first = next(iter(found.values()))
    names = [name for name in start if name.startswith(MTP)]
    for layout, tensors in found.items():
        for name in names:
            assert not torch.equal(tensors[name], start[name]), name
            assert (tensors[name] - first[name]).abs().max() <= 2e-5, (layout, name)
        for copy, name in COPIES.items():
            assert torch.equal(tensors[copy], tensors[name])


def test_its_router_balances_experts_by_the_tokens_without_padding(results: Results) -> None:
    routed = results.true.routed.float()
    expected = tensors_in(results.folder / "source")[BIAS] + BIAS_RATE * (routed.mean() - routed).sign()
    for layout in results.layouts:
        assert torch.allclose(results.tensors(layout, "saved")[BIAS], expected, rtol=0, atol=1e-7), layout


def test_exports_and_checkpoints_have_it(results: Results) -> None:
    start, first = tensors_in(results.folder / "source"), results.tensors(next(iter(results.layouts)), "saved")
    for layout in results.layouts:
        for what in ("plain", "mtp"):
            loaded = results.tensors(layout, f"{what}-loaded")
            assert loaded.keys() == start.keys()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in start.items())
        names = {name for name in start if name.startswith(MTP)}
        assert {*results.of(layout, "plain-carried")[0]} == names
        assert results.of(layout, "mtp-carried")[0] == []
        trained, resumed = (results.tensors(layout, what) for what in ("mtp-trained", "resumed"))
        assert all(torch.equal(resumed[name], tensor) for name, tensor in trained.items())
        resumed_reports, reports = results.reports(layout, "resumed"), results.reports(layout, "mtp", 1)
        assert [report["sums"] for report in resumed_reports] == [report["sums"] for report in reports]
        plain = results.tensors(layout, "plain-trained")
        assert all(torch.equal(plain[name], start[name]) for name in names)
        elsewhere = results.tensors(layout, "saved-by-first")
        assert all(torch.equal(elsewhere[name], tensor) for name, tensor in first.items())


def test_gradient_that_is_not_finite_updates_nothing(results: Results) -> None:
    for layout in results.layouts:
        for found in results.of(layout, "broken"):
            assert not math.isfinite(found["grad_norm"])
            assert not found["updated"]
            assert found["unchanged"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_mtp_checkpoint(tmp_path / "model", "deepseek_v3", seed=1)


@pytest.mark.parametrize(
    ("settings", "layers", "message"),
    [
        (["train.mtp_loss_coef=0.3"], 0, r"coef=0.3: this model has no layer .*num_nextn_predict_layers=0\): set 0"),
        (
            ["train.mtp_loss_coef=0.3"],
            2,
            "num_nextn_predict_layers=2, and not more than 1 layer .* supported: set 0",
        ),
        (["train.mtp_loss_coef=-1"], 1, "train.mtp_loss_coef: expected a number, 0 to 1,000, got -1"),
        (["train.mtp_loss_coef=0.3", "train.tp=1", "train.cp=2"], 1, "with train.cp=2 a rank lacks tokens .* or 0"),
        (["train.mtp_loss_coef=0.3", "algorithm.name=dpo"], 1, "algorithm.name=dpo has rejected answers, .* set 0"),
        (["train.mtp_loss_coef=0.3", "lora.rank=4"], 1, "and with lora all but the adapters stays as it is: leave one"),
    ],
    ids=["no layer", "two", "negative", "cp", "pairs", "lora"],
)
def test_mtp_layers_that_cannot_be_trained_are_refused(
    model: Path, settings: list[str], layers: int, message: str
) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": layers}))
    with pytest.raises(RecipeError, match=message):
        check_model(load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"model.path={model}", *settings]))


def test_checkpoint_without_its_tensors_is_refused(model: Path) -> None:
    config, tensors = read_config(model), tensors_in(model)
    check_weights(config, str(model), with_mtp=True)
    tensors.pop(f"{MTP}hnorm.weight")
    tensors[f"{MTP}eh_proj.weight"] = tensors[f"{MTP}eh_proj.weight"].T.contiguous()
    save_file(tensors, model / "model.safetensors")
    check_weights(config, str(model))
    with pytest.raises(CheckpointError) as caught:
        check_weights(config, str(model), with_mtp=True)
    assert str(caught.value).splitlines()[1:] == [
        f"  {MTP}hnorm.weight: missing, expected shape [128]",
        f"  {MTP}eh_proj.weight: shape [256, 128], config.json requires [128, 256]",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_run_trains_and_exports_it(demo: Path, tmp_path: Path) -> None:
    """And does nothing else otherwise than a run without: its policy, metrics and answers are the same."""
    start = tensors_in(experts_folder(tmp_path, demo, "deepseek_v3", make=make_mtp_checkpoint))
    settings = [*EXPERTS, "run.steps=2", "train.ep=2", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4"]
    rows, exported = {}, {}
    for name, coef in (("plain", 0), ("mtp", COEF)):
        given = [*settings, f"name={name}", f"train.mtp_loss_coef={coef}"]
        hybrid3d(tmp_path, "train", str(ROOT / "recipes/demo-cpu.yaml"), *given)
        said = hybrid3d(tmp_path, "export", f"runs/{name}", f"out-{name}")
        assert ("are untrained" in said) == (coef == 0)
        rows[name], exported[name] = read_rows(tmp_path / "runs" / name), tensors_in(tmp_path / f"out-{name}")
    losses = [row["train/mtp_loss"] for row in rows["mtp"] if "train/loss" in row]
    assert len(losses) == 2
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    for plain, found in zip(rows["plain"], rows["mtp"], strict=True):
        assert found["sync/received_bytes"] == found["sync/lower_bound_bytes"] > 0
        keys = [k for k in plain if not k.startswith("time/") and not k.endswith(("seconds", "per_second"))]
        assert {k: found[k] for k in keys} == {k: plain[k] for k in keys}
    assert exported["mtp"].keys() == start.keys()
    for name, tensor in exported["mtp"].items():
        copied = exported["mtp"][COPIES[name]] if name in COPIES else None
        if copied is not None:
            assert torch.equal(tensor, copied)
        elif name == BIAS or not name.startswith(MTP):
            assert torch.equal(tensor, exported["plain"][name]), name
        else:
            assert not torch.equal(tensor, start[name]), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_adapters_are_of_the_model_s_layers_only(demo: Path, tmp_path: Path) -> None:
    experts_folder(tmp_path, demo, "deepseek_v3", make=make_mtp_checkpoint)
    settings = [*EXPERTS, "run.steps=1", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4"]
    settings += ["lora.rank=2", "lora.sync=merged", "train.ep=2"]
    hybrid3d(tmp_path, "train", str(ROOT / "recipes/demo-cpu.yaml"), *settings)
    hybrid3d(tmp_path, "export", "runs/demo-cpu", "out")
    names = tensors_in(tmp_path / "out").keys()
    assert any(f".layers.{LAYERS - 1}." in name for name in names)
    assert not any(f".layers.{LAYERS}." in name for name in names)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "more",
    [
        ["train.tp=2", "train.pp=2", "train.ep=2", "train.router_replay=rollout"],
        ["train.tp=1", "train.pp=2", "roles.generation.ranks=2", "rollout.tp=2", "machine.gpus_per_node=2"],
        ["train.tp=1", "train.pp=2", "train.dp=2", "train.ep=2", "train.packed=true", "sync.overlap=false"],
    ],
    ids=["replay", "split", "apart"],
)
def test_syncs_of_changed_elements_leave_it_out(more: list[str], demo: Path, tmp_path: Path) -> None:
    """In bfloat16, every sync verified, and over a resume."""
    start = tensors_in(experts_folder(tmp_path, demo, "deepseek_v3", make=make_mtp_checkpoint))
    settings = [*EXPERTS, "run.checkpoint_every=2", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4"]
    settings += ["model.dtype=bfloat16", "rollout.pack_weights=false", "sync.verify=always", "optimizer.lr=1e-3"]
    settings += ["sync.delta=always"]
    settings += [f"train.mtp_loss_coef={COEF}", "guard.initial_mismatch=warn", *more]
    settings = [str(ROOT / "recipes/demo-cpu.yaml"), *settings, "run.steps=4"]
    hybrid3d(tmp_path, "train", *settings)
    shutil.rmtree(tmp_path / "runs/demo-cpu/checkpoints/step-000004")
    hybrid3d(tmp_path, "train", *settings)
    rows = read_rows(tmp_path / "runs/demo-cpu")
    losses = [row["train/mtp_loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 4
    assert all(math.isfinite(loss) and loss > 0 for loss in losses)
    assert all(row["sync/received_bytes"] == row["sync/lower_bound_bytes"] > 0 for row in rows if row["sync/dense"])
    assert [row["step"] for row in rows if not row["sync/dense"]] == [1, 3, 4]
    events = (tmp_path / "runs/demo-cpu/events.jsonl").read_text()
    assert "sync_corrupted" not in events
    hybrid3d(tmp_path, "export", "runs/demo-cpu", "out")
    exported = tensors_in(tmp_path / "out")
    assert exported.keys() == start.keys()
    assert not torch.equal(exported[f"{MTP}eh_proj.weight"], start[f"{MTP}eh_proj.weight"].bfloat16().float())

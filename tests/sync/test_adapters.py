"""Adapters (LoRA) in every layout, against plain PyTorch and against PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hybrid3d.train.megatron.adapters import Adapters
from hybrid3d.train.megatron.policy import Policy
from reference import ADAM, SFT, _laid_out, _optimizer, make_inputs, model_of, pick, tensors_in
from run_ranks import run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

RANK, ALPHA, COUNT = 4, 6.0, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp4": dict(dp=4),
    "tp2-pp2": dict(tp=2, pp=2),
    "tp4": dict(tp=4),
    "pp2-vpp2-dp2": dict(pp=2, vpp=2, dp=2),
    "tp2-ep2-dp2": dict(tp=2, ep=2, dp=2),
    "pp2-ep2-dp2-packed": dict(pp=2, ep=2, dp=2, packed=True, max_tokens_per_micro_batch=64),
    "cp2-tp2": dict(cp=2, tp=2),
    "tp2-pp2-full": dict(tp=2, pp=2, recompute="full"),
}
DENSE = ("dp4", "tp2-pp2", "tp4", "pp2-vpp2-dp2", "tp2-pp2-full", "cp2-tp2")
SPARSE = ("tp2-pp2", "tp2-ep2-dp2", "pp2-ep2-dp2-packed")
CASES = {"qwen2": DENSE, "qwen3": ("tp2-pp2",), "qwen3_moe": SPARSE, "deepseek_v3": SPARSE}

FAST = (("qwen2", "tp2-pp2"), ("deepseek_v3", "tp2-ep2-dp2"))
every_case = pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(family, layout, marks=() if (family, layout) in FAST else pytest.mark.slow)
        for family in CASES
        for layout in CASES[family]
    ],
)


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    return ".layers." in name and tensor.dim() == 2 and not name.endswith(".gate.weight")


def make_adapters(folder: Path, out: Path) -> Path:
    """Random adapters of all linear layers, as PEFT writes them."""
    random, matrices = torch.Generator().manual_seed(3), {}
    for name, weight in sorted(tensors_in(folder).items()):
        if is_linear(name, weight):
            module = f"base_model.model.{name.removesuffix('.weight')}"
            matrices[f"{module}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=random) * 0.1
            matrices[f"{module}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=random) * 0.1
    out.mkdir()
    modules = sorted({name.rsplit(".", 3)[1] for name in matrices})
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (out / "adapter_config.json").write_text(json.dumps(settings))
    save_file(matrices, out / "adapter_model.safetensors", {"format": "pt"})
    return out


class Results:
    def __init__(self, folder: Path, checkpoints: dict[str, Path]):
        self.folder, self.checkpoints = folder, checkpoints
        self._true: dict[str, list[Any]] = {}

    def of(self, family: str, layout: str) -> dict[str, Any]:
        """What the ranks wrote down in this layout."""
        file = self.folder / f"{family}-{layout}.pt"
        if not file.exists():
            job = Path(__file__).parents[1] / "jobs" / "adapters.py"
            run_ranks(job, 4, [str(self.folder / "inputs.pt"), family, layout, str(file)], timeout=200)
        return torch.load(file, weights_only=False)

    def true(self, family: str) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
        """Loss, gradient norm, and adapters after each step of plain PyTorch."""
        if family not in self._true:
            self._true[family] = true_steps(self.checkpoints[family], self.folder / f"{family}-adapters")
        return self._true[family]


def true_steps(checkpoint: Path, adapters: Path) -> list[tuple[float, float, dict[str, torch.Tensor]]]:
    model, saved = model_of(checkpoint), tensors_in(checkpoint)
    matrices = {name: tensor.requires_grad_() for name, tensor in tensors_in(adapters).items()}
    tokens, _, _, mask = _laid_out(make_inputs())
    optimizer, found = _optimizer(_Holder(matrices), SFT), []
    for _ in range(COUNT):
        optimizer.zero_grad()
        logits = torch.func.functional_call(model, adapted(model, saved, matrices), (tokens,)).logits
        loss = -pick(logits, tokens)[mask].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(list(matrices.values()), SFT["clip_grad"])
        optimizer.step()
        found.append((loss.item(), norm.item(), {name: m.detach().clone() for name, m in matrices.items()}))
    return found


class _Holder(torch.nn.Module):
    def __init__(self, matrices: dict[str, torch.Tensor]):
        super().__init__()
        self._matrices = matrices

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self._matrices.values())


def adapted(
    model: torch.nn.Module, saved: dict[str, torch.Tensor], matrices: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The model's parameters, which stack experts, with W + alpha / rank * B A in place of each W."""

    def sum_of(name: str) -> torch.Tensor:
        module = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = matrices[f"{module}.lora_A.weight"], matrices[f"{module}.lora_B.weight"]
        return saved[name] + ALPHA / RANK * b @ a

    found = {}
    for name, parameter in model.named_parameters():
        experts, _, kind = name.partition(".experts.")
        if kind in ("gate_up_proj", "down_proj"):
            parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            each = [
                torch.cat([sum_of(f"{experts}.experts.{number}.{part}.weight") for part in parts])
                for number in range(len(parameter))
            ]
            found[name] = torch.stack(each)
        elif is_linear(name, parameter):
            found[name] = sum_of(name)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Any) -> Results:
    out = tmp_path_factory.mktemp("adapters")
    checkpoints = {family: Path(tiny_checkpoint(family, 1)) for family in CASES}
    adapters = {f: str(make_adapters(folder, out / f"{f}-adapters")) for f, folder in checkpoints.items()}
    spec = make_inputs() | {"checkpoints": {f: str(c) for f, c in checkpoints.items()}, "adapters": adapters}
    spec |= {"rank": RANK, "alpha": ALPHA, "count": COUNT, "layouts": LAYOUTS, "optimizer": ADAM}
    torch.save(spec, out / "inputs.pt")
    return Results(out, checkpoints)


def assembled(parts: list[Any], true: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The whole matrices; what several ranks have must be equal."""
    whole = {name: torch.full_like(matrix, float("nan")) for name, matrix in true.items()}
    for mine in parts:
        for name, box, values in mine:
            place = whole[name][tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
            assert bool((place.isnan() | (place == values)).all()), name
            place.copy_(values)
    return whole


@every_case
def test_steps_equal_plain_pytorch(results: Results, family: str, layout: str) -> None:
    found = results.of(family, layout)
    for step, (loss, norm, after) in enumerate(results.true(family)):
        reports = [r for r in found["reports"][step] if r["is_reporting_rank"]]
        tokens = int(_laid_out(make_inputs())[3].sum())
        assert sum(r["sums"]["loss"] for r in reports) / tokens == pytest.approx(loss, rel=1e-5)
        for report in reports:
            assert report["grad_norm"] == pytest.approx(norm, rel=1e-5)
        whole = assembled(found["after"][step], after)
        assert whole.keys() == after.keys()
        for name, true in after.items():
            assert (whole[name] - true).abs().max() <= 1e-5, name
    assert found["base_is_unchanged"]


@every_case
def test_checkpoint_has_the_adapters_alone(results: Results, family: str, layout: str) -> None:
    found = results.of(family, layout)
    tensors = {name for name in found["saved"] if "layers" in name}
    assert tensors
    assert all(".lora_" in name for name in tensors)
    for saved, loaded in zip(found["after"][-1], found["loaded"], strict=True):
        for (name, _, before), (again, _, now) in zip(saved, loaded, strict=True):
            assert name == again
            assert torch.equal(before, now)


@every_case
def test_optimizer_in_bfloat16_begins_with_the_files_too(results: Results, family: str, layout: str) -> None:
    begun = tensors_in(results.folder / f"{family}-adapters")
    whole = assembled(results.of(family, layout)["bfloat16"], {n: m.bfloat16() for n, m in begun.items()})
    assert all(torch.equal(whole[name], matrix.bfloat16()) for name, matrix in begun.items())


@pytest.mark.slow
@pytest.mark.parametrize("layout", CASES["qwen3_moe"])
def test_adapters_of_experts_alone_are_saved(results: Results, layout: str) -> None:
    assert results.of("qwen3_moe", layout)["experts_only"]


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_plain_pytorch_computes_what_peft_does(results: Results, family: str) -> None:
    from peft import PeftModel

    model = model_of(results.checkpoints[family])
    model = PeftModel.from_pretrained(model, results.folder / f"{family}-adapters", is_trainable=True)
    tokens, _, _, mask = _laid_out(make_inputs())
    trained = {n.replace(".default.", "."): p for n, p in model.named_parameters() if p.requires_grad}
    loss = -pick(model(tokens).logits, tokens)[mask].mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), SFT["clip_grad"])
    _optimizer(_Holder(trained), SFT).step()
    true_loss, true_norm, after = results.true(family)[0]
    assert loss.item() == pytest.approx(true_loss, rel=1e-6)
    assert norm.item() == pytest.approx(true_norm, rel=1e-5)
    assert trained.keys() == after.keys()
    for name, matrix in after.items():
        assert (trained[name] - matrix).abs().max() <= 1e-6, name


class FullMemory(torch.nn.Module):
    """Adapters for which there is no GPU memory left."""

    def added(self) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("fails_at", [0, 1])
def test_merge_without_memory_fails_with_what_says_so(fails_at: int) -> None:
    """At the first or the last of two virtual stages: the other stage is as before, or was never merged."""
    layers = [torch.nn.Linear(2, 2) for _ in range(2)]
    before = [layer.weight.detach().clone() for layer in layers]
    stages = []
    for number, layer in enumerate(layers):
        adapters = Adapters()
        added = torch.nn.Module()
        added.added = lambda: torch.ones(2, 2)
        adapters.attach(layer, FullMemory() if number == fails_at else added)
        stages.append(SimpleNamespace(adapters=adapters))
    policy: Any = SimpleNamespace(adapters=object(), stages=stages, onload=lambda kind: None)
    with pytest.raises(torch.OutOfMemoryError), Policy.merged(policy):
        pass
    assert all(torch.equal(layer.weight, weight) for layer, weight in zip(layers, before, strict=True))

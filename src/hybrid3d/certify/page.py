"""The page of a certification: what was proven, what was not and why, and of which versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hybrid3d import __version__
from hybrid3d.certify.findings import CHECKS
from hybrid3d.config import Recipe

PACKAGES = ("torch", "vllm", "megatron-core", "transformer-engine", "transformers", "safetensors")
MAX_LINES = 10  # of a check that is refused
UNITS = {"answers": "tokens", "engines": "tokens", "modules": "outputs", "verification": "pieces"}


def summarize(recipe: Recipe, source: str, tiny: bool, rounds: int, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the certificate as a JSON object.

    Args:
        source: the model that was named.
        tiny: whether a tiny checkpoint of the same config stands for it.
        rounds: how many were to be done.
        result: as `Certification.result` returns it.
    """
    checks = {}
    for name, proves in CHECKS.items():
        found = dict(result["checks"][name])
        status = "refused" if found["wrong"] else "proven" if found["compared"] else "not proven"
        checks[name] = {"status": status, "proves": proves, **found}
    refused = _any_refused(checks)
    proven = all(check["status"] == "proven" for check in checks.values())
    return {
        "model": source,
        "tiny": tiny,
        "proven": proven,
        "rounds": result["rounds"],
        "syncs_of_changes": result["deltas"],
        "mismatch": result["mismatch"],
        "layouts": {"train": _train(recipe), "rollout": _rollout(recipe)},
        "dtype": recipe.model.dtype,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"hybrid3d": __version__, **{name: _version(name) for name in PACKAGES}},
        "checks": checks,
        "not_proven": list(_not_proven(recipe, tiny, rounds, refused, result)),
    }


def _train(recipe: Recipe) -> str:
    layout = recipe.train
    sizes = {key: getattr(layout, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
    return " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1 or key in ("tp", "pp"))


def _rollout(recipe: Recipe) -> str:
    assert recipe.rollout is not None
    return f"tp{recipe.rollout.tp} dp{recipe.rollout.dp}" + (" ep" if recipe.rollout.expert_parallel else "")


def _version(package: str) -> str | None:
    for name in (package, f"{package}-cpu"):  # as vLLM's build for CPUs is named
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _not_proven(recipe: Recipe, tiny: bool, rounds: int, refused: bool, result: Mapping[str, Any]) -> Iterator[str]:
    if refused:
        yield f"rounds after round {result['rounds']} of {rounds}: the first that is refused is the last"
    if not result["deltas"] and not refused:
        why = "; ".join(result["dense_reasons"]) or "there was no round for it"
        yield f"syncs of changed elements: {why}"
    if result["checks"]["answers"]["compared"] == 0 and not refused:
        yield "what the engines compute: vLLM 0.32 crashes on a CPU where ranks share experts (rollout.expert_parallel)"
    if tiny:
        yield "the sizes of the full model: a tiny checkpoint of the same config was used"
    if not torch.cuda.is_available():
        yield "kernels for GPUs and their weight layouts, CUDA graphs, NCCL, memory that sleep frees: there is no GPU"
    yield "how the optimizer records which elements it changed: here noise changes the weights"
    yield "weights in FP8 (`rollout.quantization`): here both engines have those of the same dtype"
    yield "other layouts than this one: name them, as in train.tp=2 rollout.tp=4"


def format_page(found: Mapping[str, Any]) -> str:
    """Return the certificate as text in Markdown."""
    verdict = "all proven" if found["proven"] else "refused" if _any_refused(found["checks"]) else "not all proven"
    versions = ", ".join(f"{name} {number or '(not installed)'}" for name, number in found["versions"].items())
    model = f"{found['model']}{' (a tiny checkpoint of its config)' if found['tiny'] else ''}"
    lines = [
        f"# {model}: {verdict}",
        "",
        f"{found['rounds']} rounds, {found['syncs_of_changes']} with a sync of changed elements; {found['dtype']} on "
        f"{found['device']}; train {found['layouts']['train']}, rollout {found['layouts']['rollout']}",
        "",
        versions,
        "",
        "| check | result | compared | what it proves |",
        "|---|---|---|---|",
    ]
    for name, check in found["checks"].items():
        size = f", {check['bytes'] / 1e6:.1f} MB" if check["bytes"] else ""
        compared = f"{check['compared']:,} {UNITS.get(name, 'tensors')}{size}"
        lines.append(f"| {name} | {check['status']} | {compared} | {check['proves']} |")
    for name, check in found["checks"].items():
        if check["wrong"]:
            more = len(check["wrong"]) - MAX_LINES + check["more_wrong"]
            lines += ["", f"Refused by `{name}`:", ""]
            lines += [f"- {text}" for text in check["wrong"][:MAX_LINES]]
            lines += [f"- and {more} more"] if more > 0 else []
    lines += ["", "Not proven:", "", *(f"- {text}" for text in found["not_proven"])]
    return "\n".join(lines)


def _any_refused(checks: Mapping[str, Any]) -> bool:
    return any(check["status"] == "refused" for check in checks.values())

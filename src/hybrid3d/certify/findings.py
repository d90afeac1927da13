"""The findings of a certification, and its page: what was proven, what was not and why, and of which versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from hybrid3d import __version__, installed_version
from hybrid3d.config import Recipe

MAX_NAMES = 50  # of a check that are kept

# Each check, in the order of a round, and what it proves.
CHECKS: Mapping[str, str] = {
    "load": "Megatron's weights are those of the checkpoint's files",
    "verification": "the checksums of all boxes are equal at both ends of each sync",
    "export": "the exported files hold Megatron's weights",
    "weights": "vLLM holds, bit for bit, what its own loader makes of the exported files",
    "modules": "each linear, embedding, head and expert block computes the same bits",
    "answers": "sampled answers and their log-probabilities have the same bits",
    "engines": "Megatron computes the log-probabilities that vLLM computes, within what the dtype explains",
}


@dataclass
class Check:
    """The result of one check over all rounds.

    Attributes:
        compared: how many tensors, modules or tokens were compared.
        wrong: what is not as it must be: names, each with the first difference.
    """

    compared: int = 0
    nbytes: int = 0
    wrong: list[str] = field(default_factory=list)


class Findings:
    """The results of all checks on one rank."""

    def __init__(self) -> None:
        self.checks = {name: Check() for name in CHECKS}

    def compare(self, name: str, found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        """Compare tensors of the same names bit for bit."""
        unpaired = sorted(found.keys() ^ expected.keys())
        wrong = [f"{key}: {'not expected' if key in found else 'missing'}" for key in unpaired]
        both = [key for key in found if key in expected]
        for key in both:
            if difference := describe_difference(found[key], expected[key]):
                wrong.append(f"{key}: {difference}")
        self.count(name, len(both), sum(expected[key].nbytes for key in both), wrong)

    def count(self, name: str, compared: int, nbytes: int, wrong: Sequence[str]) -> None:
        """Add the result of another comparison."""
        check = self.checks[name]
        check.compared, check.nbytes = check.compared + compared, check.nbytes + nbytes
        check.wrong += wrong

    @property
    def any_wrong(self) -> bool:
        return any(check.wrong for check in self.checks.values())

    def as_json(self) -> dict[str, Any]:
        return {name: asdict(check) for name, check in self.checks.items()}


def describe_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    """Return how two tensors differ; empty if no bit does."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (found, expected)]
        return f"{kinds[0]} instead of {kinds[1]}"
    differs = (_as_bytes(found) != _as_bytes(expected)).view(max(1, found.numel()), -1).any(1)
    if not found.numel() or not bool(differs.any()):
        return ""
    first = int(differs.nonzero()[0])
    at = [int(i) for i in torch.unravel_index(torch.tensor(first), found.shape)] if found.dim() else []
    values = found.flatten()[first].item(), expected.flatten()[first].item()
    return f"{int(differs.sum())} of {found.numel()} elements differ, at {at} {values[0]:g} instead of {values[1]:g}"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def join(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of all ranks together: sums of what was compared, and what is wrong with its ranks."""
    joined: dict[str, Any] = {}
    for name in CHECKS:
        ranks_of: dict[str, list[int]] = {}
        for rank, found in enumerate(of_ranks):
            for text in dict.fromkeys(found[name]["wrong"]):
                ranks_of.setdefault(text, []).append(rank)
        wrong = [f"{text} (rank {', '.join(map(str, ranks))})" for text, ranks in ranks_of.items()]
        joined[name] = {
            "compared": sum(found[name]["compared"] for found in of_ranks),
            "bytes": sum(found[name]["nbytes"] for found in of_ranks),
            "wrong": wrong[:MAX_NAMES],
            "more_wrong": max(0, len(wrong) - MAX_NAMES),
        }
    return joined


PACKAGES = ("torch", "vllm", "megatron-core", "transformer-engine", "transformers", "safetensors")
MAX_LINES = 10  # of a check that is refused
UNITS = {"answers": "tokens", "engines": "tokens", "modules": "outputs", "verification": "pieces"}


def summarize(recipe: Recipe, source: str, tiny: bool, rounds: int, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the certificate as a JSON object.

    Args:
        tiny: whether a tiny checkpoint of the same config stands for the model `source`.
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
        "layouts": _layouts(recipe),
        "dtype": recipe.model.dtype,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {"hybrid3d": __version__, **{name: installed_version(name, f"{name}-cpu") for name in PACKAGES}},
        "checks": checks,
        "not_proven": list(_not_proven(recipe, tiny, rounds, refused, result)),
    }


def _layouts(recipe: Recipe) -> dict[str, str]:
    train, rollout = recipe.train, recipe.rollout
    assert rollout is not None
    sizes = {key: getattr(train, key) for key in ("tp", "pp", "vpp", "cp", "ep", "etp", "dp")}
    return {
        "train": " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1 or key in ("tp", "pp")),
        "rollout": f"tp{rollout.tp} dp{rollout.dp}" + (" ep" if rollout.expert_parallel else ""),
    }


def _not_proven(recipe: Recipe, tiny: bool, rounds: int, refused: bool, result: Mapping[str, Any]) -> Iterator[str]:
    if refused:
        yield f"rounds after round {result['rounds']} of {rounds}: the first that is refused is the last"
    if not result["deltas"] and not refused:
        why = "; ".join(result["dense_reasons"]) or "there was no round for it"
        yield f"syncs of changed elements: {why}"
    if result["deltas"] and (whole := result["wanted_bytes"] - result["sparse_bytes"]):
        part = f"{100 * whole / result['wanted_bytes']:.0f} % of the bytes"
        yield f"changed elements of {part}: vLLM keeps these not as they are loaded, so that they were sent in full"
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

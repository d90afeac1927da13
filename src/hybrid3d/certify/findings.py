"""What a certification compares, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

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
        nbytes: their bytes.
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
        check = self.checks[name]
        for key in sorted(found.keys() ^ expected.keys()):
            check.wrong.append(f"{key}: {'not expected' if key in found else 'missing'}")
        for key in found.keys() & expected.keys():
            check.compared += 1
            check.nbytes += expected[key].nbytes
        problems = [
            f"{key}: {problem}"
            for key in found
            if key in expected and (problem := describe_difference(found[key], expected[key]))
        ]
        check.wrong += problems

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

"""Training steps of tiny models against the numbers of a CPU.

    PYTHONPATH=src:tests python -m gpu.training

runs them on this machine's CPU and writes `training_numbers.json`. Packing and recompute must not change the numbers:
each variant is compared with those of padded sequences.
"""

from __future__ import annotations

import itertools
import json
import resource
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gpu import one_rank
from gpu.comparisons import TOLERANCE, compare
from gpu.models import CONFIGS
from gpu.record import Record
from hybrid3d.certify.tiny_models import write_checkpoint
from hybrid3d.config import Recipe
from hybrid3d.families import Config
from hybrid3d.reshard.move.device import ON_CUDA, synchronize
from hybrid3d.rl.objective import sft_loss
from hybrid3d.train.megatron.runtime import USE_TE, in_use

NUMBERS = Path(__file__).with_name("training_numbers.json")
FAMILIES = ("dense", "experts", "latent")
VARIANTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "packed": {"packed": True},
    "recompute": {"recompute": "full"},
}
STEPS = 3
FP8_TOLERANCE = (5e-2, 2e-1)  # assumed: it has not been measured yet


def training(record: Record, device: str, family: str) -> None:
    """Take three steps in each dtype and variant, and compare their losses and gradient norms with the stored ones."""
    record(kernels=in_use())
    with tempfile.TemporaryDirectory() as folder:
        for dtype, variant, found, seconds in _runs(Path(folder), family):
            record(**{f"{dtype} {variant}": found | {"seconds": seconds}})
            # Transformer Engine multiplies float32 matrices in TF32
            limits = TOLERANCE["bfloat16" if USE_TE else dtype]
            compare(
                found,
                json.loads(NUMBERS.read_text(encoding="utf-8"))["numbers"][family][dtype],
                limits,
                f"{dtype}, {variant}",
            )
    record(peak_bytes=_peak_memory())


def _peak_memory() -> int:
    """Return the peak in bytes of torch's reserved GPU memory or, without a GPU, of the process's memory."""
    if ON_CUDA:
        return torch.cuda.max_memory_reserved()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def with_transformer_engine(record: Record, device: str) -> None:
    """Take the steps of a dense model, packed ones too, with Transformer Engine's layers."""
    assert USE_TE, f"Transformer Engine is installed and not used: {in_use()}"
    training(record, device, "dense")


def in_fp8(record: Record, device: str) -> None:
    """Take three steps of dense layers and of experts with each kind of FP8, and compare them with bfloat16's."""
    assert USE_TE, f"Transformer Engine is installed and not used: {in_use()}"
    one_rank.start()
    for family, fp8 in itertools.product(("dense", "experts"), ("tensorwise", "blockwise")):
        stored = json.loads(NUMBERS.read_text(encoding="utf-8"))["numbers"][family]["bfloat16"]
        with tempfile.TemporaryDirectory() as folder:
            write_checkpoint(Path(folder), CONFIGS[family])
            found, seconds = _steps(CONFIGS[family], one_rank.recipe_for(folder, "bfloat16", fp8=fp8))
        record(**{f"{family} {fp8}": found | {"seconds": seconds}})
        compare(found, stored, FP8_TOLERANCE, f"{family}, {fp8}")


def _runs(
    folder: Path, family: str, variants: Sequence[str] = tuple(VARIANTS)
) -> Iterator[tuple[str, str, dict[str, Any], list[float]]]:
    """Yield dtype, variant, losses and gradient norms of its steps, and the seconds of each."""
    config = CONFIGS[family]
    write_checkpoint(folder, config)
    one_rank.start()
    for dtype in TOLERANCE:
        for variant in variants:
            if USE_TE and (dtype, variant) == ("float32", "packed"):
                continue  # it has no attention for this
            yield dtype, variant, *_steps(config, one_rank.recipe_for(folder, dtype, **VARIANTS[variant]))


def _steps(config: Config, recipe: Recipe) -> tuple[dict[str, list[float]], list[float]]:
    """Return losses and gradient norms of steps of a new model, and the seconds of each."""
    policy = one_rank.make_policy(config, recipe)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    seconds = []
    batch = one_rank.make_batch(config, 0)  # the same in each step: a wrong update shows in the next loss
    for _ in range(STEPS):
        began = time.perf_counter()
        report = policy.train_step(batch, sft_loss, recipe)
        synchronize()
        seconds.append(round(time.perf_counter() - began, 4))
        found["loss"].append(report.sums["loss"] / float(batch.response_mask.sum()))
        found["grad_norm"].append(report.grad_norm)
    return found, seconds


def main() -> None:
    """Write the numbers of this machine's CPU; each family in a process of its own would be the same."""
    import multiprocessing

    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        numbers = dict(zip(FAMILIES, pool.map(_measure, FAMILIES, chunksize=1), strict=True))
    stored = {
        "command": "PYTHONPATH=src:tests python -m gpu.training",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "numbers": numbers,
    }
    NUMBERS.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")


def _measure(family: str) -> dict[str, dict[str, list[float]]]:
    with tempfile.TemporaryDirectory() as folder:
        return {dtype: found for dtype, _, found, _ in _runs(Path(folder), family, ["padded"])}


if __name__ == "__main__":
    main()

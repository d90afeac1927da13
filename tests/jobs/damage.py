"""One rank of a proof: whatever is done to a file of a checkpoint, every reader names it and changes nothing.

    torchrun --nproc-per-node 2 damage.py RECIPE OUT

A checkpoint is saved in the folder of the recipe's run, under OUT, and copies of it are damaged, one after another.
OUT/rank-<n>.json gets what each reader said of each copy: tests/storage/test_checkpoint_damage.py judges it.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from hybrid3d import distributed
from hybrid3d.config import load_recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.move.transport import as_bytes
from hybrid3d.run.folder import RunFolder, checkpoint_folder
from hybrid3d.run.logger import Display, RunLogger
from hybrid3d.storage import manifest
from hybrid3d.train.megatron import checkpoint, runtime
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.trainer.checkpoints import Checkpoints


def flip(where: float) -> Callable[[Path], None]:
    """Flip one bit, so far into a file, 0 to 1."""

    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[min(int(len(content) * where), len(content) - 1)] ^= 4
        path.write_bytes(content)

    return damage


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 2 // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_link(path: Path) -> None:
    """The same content, outside of the checkpoint."""
    elsewhere = path.parent.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


DAMAGES = {
    "flipped at its start": flip(0),
    "flipped in its middle": flip(0.5),
    "flipped at its end": flip(1),
    "cut": cut,
    "emptied": empty,
    "removed": Path.unlink,
    "a folder": replace_by_folder,
    "a link": replace_by_link,
}


def copy(source: Path, target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    shutil.copytree(source, target)


def outcome(read: Callable[[], Any]) -> dict[str, Any]:
    try:
        read()
    except BaseException as error:  # what PyTorch raises of checkpoints is no Exception
        return {
            "raised": type(error).__name__,
            "said": str(error),
            "raised_on_all_ranks": getattr(error, "raised_on_all_ranks", False),
        }
    return {"raised": None}


def snapshot(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: as_bytes(tensor.detach().clone().contiguous()) for name, tensor in policy.weights.tensors.items()}


@record
def main(recipe_file: str, out: Path) -> None:
    distributed.start()
    rank, recipe = dist.get_rank(), load_recipe(recipe_file)
    runtime.initialize(recipe.train, seed=1)
    folder = RunFolder(out / recipe.name)
    whole, damaged = checkpoint_folder(folder, 1), checkpoint_folder(folder, 2)
    if rank == 0:
        folder.create(recipe)
    config = read_config(recipe.model.path)
    policy = Policy(config, recipe, rank)
    models = {"policy": policy}
    checkpoint.begin(models, whole, {"told": 1}, dist.group.WORLD).finish()
    other = Policy(config, recipe, rank, trainable=False)  # loaded into it would show
    for model in (policy, other):
        for tensor in model.weights.tensors.values():
            tensor.data.add_(1)
    before = [snapshot(policy), snapshot(other)]
    found = []
    for file in sorted(path.name for path in whole.iterdir()):
        for how, damage in DAMAGES.items():
            readers = {
                "load": lambda: checkpoint.load(models, damaged, dist.group.WORLD),
                "load_weights": lambda: checkpoint.load_weights({"policy": other}, damaged, dist.group.WORLD),
            }
            if rank == 0:
                copy(whole, damaged)
                damage(damaged / file)
            dist.barrier()
            said = {name: outcome(read) for name, read in readers.items()}
            same = all(
                torch.equal(was[name], now[name])
                for was, now in zip(before, [snapshot(policy), snapshot(other)], strict=True)
                for name in was
            )
            if how in ("flipped in its middle", "a folder"):
                checkpoints = Checkpoints(models, RunLogger(folder, rank, Display("run", 1, None)), dist.group.WORLD)
                said["resume"] = {"raised": None, "step": checkpoints.resume()[0]}
                for tensor in policy.weights.tensors.values():
                    tensor.data.add_(1)
                before[0] = snapshot(policy)
            found.append({"file": file, "how": how, "unchanged": same, **said})
            dist.barrier()
    if rank == 0:  # as a list of files that was made anew would have it
        copy(whole, damaged)
        for path in damaged.glob("*.distcp"):  # whichever of them has the weights
            path.write_bytes(b"")
        manifest.write(damaged, {name: manifest.fsync_and_crc(damaged / name) for name in manifest.list_files(damaged)})
    dist.barrier()
    unloadable = outcome(lambda: checkpoint.load_weights({"policy": other}, damaged, dist.group.WORLD))
    (out / f"rank-{rank}.json").write_text(json.dumps({"damaged": found, "unloadable": unloadable}))
    dist.barrier()
    if rank == 0:
        shutil.rmtree(damaged, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))

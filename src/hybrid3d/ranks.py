"""The processes of a run: who this rank is, the default process group, and small exchanges between ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

IDENT = "HYBRID3D_RUN"


def under_launcher() -> bool:
    """Whether this process is one rank of a `torchrun` or an `srun` already."""
    return "RANK" in os.environ or ("SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_NTASKS", "1")) > 1)


def adopt_slurm() -> None:
    """Say what `srun` says in the words of `torchrun`; the rendezvous address must be in the environment."""
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]


def ident() -> str:
    """A name that no other run on this machine has."""
    return os.environ.get(IDENT) or f"{os.environ['MASTER_ADDR']}-{os.environ['MASTER_PORT']}"


def remove_shared_memory(run: str) -> None:
    """Remove the segments that a run which died left behind."""
    for segment in Path("/dev/shm").glob(f"*{run}*"):
        segment.unlink(missing_ok=True)


def environment_rank() -> int:
    """This process's number under `torchrun` or `srun`, before anything is started."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def environment_world_size() -> int:
    """How many ranks `torchrun` or `srun` started, before anything is."""
    return int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))


def rank() -> int:
    """This process's number."""
    return int(os.environ["RANK"])


def world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def start() -> None:
    """Bind this rank to its GPU, where there is one, and build the default process group."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(minutes=10))


def gather(value: Any) -> list[Any]:
    """Every rank's value, by rank, on every rank. For records, not for tensors."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values

"""One rank of a TP group in which vLLM captures a CUDA graph with its custom all-reduce.

    torchrun --nproc-per-node N graph_capture.py OUT ORDERS

ORDERS is a JSON list of orders of the N ranks: the rank of each slot of the group. The kernels, which need GPUs, are
replaced: each rank has the addresses [rank] and the offsets [10 * rank], and what is registered is written down. OUT is
a folder: rank r writes r.json, the handles and offsets that it was given in each order.
"""

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from vllm import _custom_ops
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import custom_all_reduce

from hybrid3d import distributed
from hybrid3d.rollout import engine  # noqa: F401 (it applies the patches)
from hybrid3d.rollout.patches import groups_over_slots


class Kernels:
    """Stands for `vllm._custom_ops`."""

    def __init__(self, rank: int):
        self._rank = rank
        self.registered: list[Any] = []

    def get_graph_buffer_ipc_meta(self, pointer: int) -> tuple[list[int], list[int]]:
        return [self._rank], [10 * self._rank]

    def register_graph_buffers(self, pointer: int, handles: list[list[int]], offsets: list[list[int]]) -> None:
        self.registered.append([handles, offsets])


def capture(group: dist.ProcessGroup) -> None:
    """Run what vLLM runs around the capture of a graph, without the constructor, which opens peers' GPU memory."""
    communicator = custom_all_reduce.CustomAllreduce.__new__(custom_all_reduce.CustomAllreduce)
    communicator._ptr, communicator.group, communicator.rank = 1, group, dist.get_rank(group)
    communicator.disabled = False
    with torch.inference_mode(), communicator.capture():
        pass
    communicator.disabled = True  # there is nothing to close


@record
def main(out: Path, orders: list[list[int]]) -> None:
    distributed.start()
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in ("get_graph_buffer_ipc_meta", "register_graph_buffers"):
        theirs, ours = (inspect.signature(getattr(kernels, name)) for kernels in (_custom_ops, Kernels(rank)))
        assert len(theirs.parameters) == len(ours.parameters), f"vLLM's {name} has other arguments: {theirs}"
    custom_all_reduce.ops = kernels = Kernels(rank)
    for order in orders:
        slots = [order.index(one) for one in range(world)]
        with groups_over_slots(slots):
            group = parallel_state.init_model_parallel_group(
                [list(range(world))], 0, "gloo", group_name="tp", use_device_communicator=False
            )
        assert group.rank_in_group == slots[rank] == dist.get_rank(group.cpu_group)
        capture(group.cpu_group)
        group.destroy()
    (out / f"{rank}.json").write_text(json.dumps(kernels.registered))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

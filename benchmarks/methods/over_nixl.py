"""hybrid3d's own plan over NIXL: a rank writes messages into the memory of another one (`sync.transport: nixl`)."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.distributed as dist

from hybrid3d.distributed import all_reduce_min
from hybrid3d.reshard.ends import Sink, Source
from hybrid3d.reshard.move.executor import Executor
from hybrid3d.reshard.move.transport import make_transport
from hybrid3d.reshard.plan.planner import RankPlan


def is_installed(group: dist.ProcessGroup) -> bool:
    """Return whether every rank of the group has NIXL; all ranks call it together."""
    return bool(all_reduce_min(int(find_spec("nixl") is not None), group))


class OverNixl:
    """Executes a plan over NIXL alone, also between ranks that share memory. Every rank calls `run` together.

    Attributes:
        nbytes: the bytes of its buffers.
        operations: the sends, receives and copies of a run.
    """

    def __init__(
        self, plan: RankPlan, source: Source, sink: Sink, per_node: int, group: dist.ProcessGroup, device: torch.device
    ):
        """
        Args:
            per_node: ranks that share a node.
        """
        transport = make_transport(device, group, per_node, kind="nixl")
        self._executor = Executor(plan, source, sink, transport, device)
        self.nbytes, self.operations = sum(plan.staging_bytes), self._executor.operations

    def run(self) -> int:
        """Run once, and return the received bytes."""
        return self._executor.run().received_bytes

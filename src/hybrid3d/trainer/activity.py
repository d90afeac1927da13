"""Gathers what all ranks did during a step: for the timeline, and for the memory of its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from hybrid3d.distributed import gather_objects
from hybrid3d.run.memory import Peaks
from hybrid3d.run.metrics import PhaseTimer
from hybrid3d.run.timeline import Span
from hybrid3d.workers.roles import WorkerServer


@dataclass(frozen=True)
class StepActivity:
    """What each rank did during a step, and the memory that it used.

    Attributes:
        spans: by rank, its activities with their begin and end.
        peaks: by rank, the most bytes during each activity.
    """

    spans: Mapping[int, Sequence[Span]]
    peaks: Mapping[int, Peaks]

    @property
    def peak_gb(self) -> float:
        """The most memory that a rank used, in 10^9 bytes."""
        return max((nbytes for peaks in self.peaks.values() for nbytes in peaks.values()), default=0) / 1e9


def gather_activity(timer: PhaseTimer, group: dist.ProcessGroup, workers: WorkerServer | None = None) -> StepActivity:
    """Gather the step of all ranks of the run, on every rank that trains.

    Args:
        timer: that of this rank.
        workers: on the first rank, the ranks that do not train, if there are any.
    """
    spans = dict[int, Sequence[Span]]({group.rank(): timer.spans})
    peaks = dict[int, Peaks]({group.rank(): timer.peaks})
    if workers is not None:
        spans |= workers.spans(timer.spans[0][1], timer.spans[-1][2])
        peaks |= workers.lap_peaks()
    found = gather_objects((spans, peaks), group)
    return StepActivity(
        {rank: one for of_rank, _ in found for rank, one in of_rank.items()},
        {rank: one for _, of_rank in found for rank, one in of_rank.items()},
    )

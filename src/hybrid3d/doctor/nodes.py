"""The examination of several nodes, by the ranks that torchrun or srun has started on them."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING

from hybrid3d import launch_environment
from hybrid3d.config import Recipe
from hybrid3d.doctor import groups
from hybrid3d.doctor.answers import SECONDS, ask
from hybrid3d.doctor.finding import Context, Finding
from hybrid3d.doctor.page import Examination, Subject, can_start, examine, print_page
from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from hybrid3d.ledger import RankStart

ON_ALL_NODES = ("rendezvous", "groups")  # subjects about all nodes together: the ranks themselves try both


class NodesExamination:
    """Examines this node, if this is its first rank, and then, with all ranks, the process groups.

    Attributes:
        can_start: after `run`, whether a run can start on these nodes; equal on every rank.
    """

    def __init__(self, recipe: Recipe, examinations: Sequence[Examination], as_json: bool):
        self.can_start = True
        self._recipe, self._as_json = recipe, as_json
        self._measures = any(one.subject == "groups" for one in examinations)
        self._of_node: list[Subject] = []
        if launch_environment.local_rank() == 0:
            here = [one for one in examinations if one.subject not in ON_ALL_NODES]
            self._of_node = list(examine(recipe, here))

    def run(self, folder: RunFolder, start: RankStart) -> None:
        """Measure, and print the page on rank 0. Every rank calls this together."""
        from hybrid3d.ledger import gather  # imports torch

        rank, store, console = start.rank, start.store, start.console
        found = [[subject, [asdict(one) for one in findings]] for subject, findings in self._of_node]
        of_nodes = gather(store, rank, launch_environment.world_size(), "doctor", [socket.gethostname(), found])
        subjects: list[Subject] = [
            (f"{host}: {subject}", tuple(Finding(**one) for one in findings))
            for host, found in of_nodes
            for subject, findings in found
        ]
        self._share_verdict("nodes", subjects, rank, store)
        if self._measures and self.can_start:
            groups.measure_groups(self._recipe, folder, start)
            subjects += [("groups", self._compare(folder))] if rank == 0 else []
            self._share_verdict("groups", subjects, rank, store)
        if rank == 0:
            assert console is not None, "rank 0 has a console"
            print_page(console, self._recipe, subjects, self._as_json)

    def _share_verdict(self, of: str, subjects: Sequence[Subject], rank: int, store: Store) -> None:
        """Let every rank know what rank 0 knows: whether a run can start."""
        from hybrid3d.ledger import share

        wait = timedelta(seconds=2 * SECONDS)
        self.can_start = share(store, rank, f"verdict on {of}", lambda: can_start(subjects), wait)

    def _compare(self, folder: RunFolder) -> tuple[Finding, ...]:
        machine = Context(self._recipe, ask(self._recipe, ["machine"])).answer("machine")
        measured = json.loads((folder.path / groups.GROUPS).read_text(encoding="utf-8"))
        return tuple(groups.describe(self._recipe, measured, bool(machine and machine["gpus"])))

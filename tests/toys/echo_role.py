"""A toy role: its ranks say how long the texts are that they are asked about, and which rank says it."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from hybrid3d import launch_environment
from hybrid3d.config import Recipe
from hybrid3d.run.logger import RunLogger
from hybrid3d.scoring.scorer import Query, Scores
from hybrid3d.workers.channel import Connection
from hybrid3d.workers.loop import Role
from hybrid3d.workers.messages import Call, Reply, Score, WithTexts
from hybrid3d.workers.role_client import RoleClient, WorkerGroup

ROLE = Role("toys.echo_role:Echoes", "toys.echo_role:EchoRank", "nothing helps")


class EchoRank:
    """Implements `RoleRank`."""

    def __init__(self, recipe: Recipe, store: Store, ranks: range, start: int):
        self.start, self.ready = start, False

    def begin(self, connection: Connection) -> None: ...

    def interrupt(self) -> None: ...

    def call(self, call: Call) -> Reply:
        assert isinstance(call, Score)
        self.ready = True
        lengths = [float(len(query.answer)) for query in call.shares[0].whole()]
        return Reply(scores={0: Scores([*lengths, float(launch_environment.rank())])})

    def close(self) -> None: ...


class Echoes(RoleClient):
    """What the first rank that trains sees of the ranks of the role."""

    activity = "echo"

    def __init__(self, recipe: Recipe, store: Store, record: RunLogger):
        super().__init__(recipe, store, record, "echo")

    def ask(self, texts: Sequence[str]) -> list[list[float]]:
        """Return what all ranks of the role say, after waiting for all of them."""
        groups = self._wait_for(lambda: self._active, "", "")
        call = Score({0: WithTexts.of([Query(text, "", "") for text in texts])}, "echo")
        replies = self._receive(self._send(dict.fromkeys(groups, call)))
        return [list(reply.scores[0].rewards) for of_group in replies.values() for reply in of_group]

    def _record_lost(self, group: WorkerGroup, moment: float, ready: int) -> None:
        self._record.event("echo_lost", ranks=group.ranks, time=moment)

"""A rank that generates, where other ranks train: what it does for them."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from msgspec.structs import replace
from torch.distributed.distributed_c10d import Store

from hybrid3d import distributed, launch_environment
from hybrid3d.config import Recipe
from hybrid3d.generation.replicas import EngineReplicas
from hybrid3d.inputs.models import read_tokenizer
from hybrid3d.process import new_engine_name, set_shared_memory_prefix
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.run.memory import meter
from hybrid3d.run.metrics import StepMetrics
from hybrid3d.sync import Sync, policy_sync
from hybrid3d.sync.elastic import ElasticSync, Members
from hybrid3d.watch.heartbeat import enter_phase
from hybrid3d.watch.work_meter import record as work_record
from hybrid3d.workers.channel import Connection
from hybrid3d.workers.messages import Advance, Call, Reply, Score, SyncWeights

# The phase of each call, and what its rank is busy with meanwhile
CALLS: dict[type[Call], tuple[str, str]] = {
    SyncWeights: ("sync", "sync"),
    Advance: ("advance", "generate"),
    Score: ("score", "generate"),
}


class GenerationRank:
    """One rank of an engine.

    An engine is the ranks of `rollout.tp` x `rollout.dp`, and what is lost together: its ranks have process groups of
    their own, apart from those of the syncs.

    Attributes:
        start: number of the start of the engine.
        ready: whether it has had weights.
    """

    def __init__(self, recipe: Recipe, store: Store, ranks: range, start: int):
        """
        Args:
            ranks: those of its engine.
            start: number of this start of the engine.
        """
        name = new_engine_name(launch_environment.run_id(), ranks.start, start)
        set_shared_memory_prefix(name)
        group = distributed.start_among(ranks, f"engine/{ranks.start}/{start}", store)
        self.start, self._leads = start, group.rank() == 0
        self._has_message: Callable[[], bool] | None = None
        self._engine = RolloutEngine(recipe, group.rank(), name, range(len(ranks)))
        work_record.generates(self._engine.rank_in_replica, lambda: self._engine.generated)
        self._replicas = EngineReplicas(recipe, self._engine, read_tokenizer(recipe), group, receivers=[0])

        def make_sync(everyone: dist.ProcessGroup, weights: dist.ProcessGroup, ranks: tuple[int, ...]) -> Sync:
            return policy_sync(recipe, everyone, engine=self._engine, transport_group=weights, ranks=ranks)

        self._sync = ElasticSync(store, make_sync)
        self.ready = False

    def begin(self, connection: Connection) -> None:
        """Begin to serve a start of the ranks that train; what an earlier one has asked for is dropped."""
        self._sync.leave()
        self._replicas.reset()
        self._has_message = connection.has_message

    def interrupt(self) -> None:
        """Let the sync in progress fail. Any thread may call it."""
        self._sync.interrupt()

    def sync(self, members: Members, version: int, verify: bool) -> StepMetrics | None:
        """Sync the weights; return this rank's share of the metrics, or None if a member has been lost."""
        work_record.begin_step(version)
        self._sync.begin(members, version, verify)
        self._sync.bucket_ready(0, last=True)
        report = self._sync.finish()
        self.ready |= report is not None
        return None if report is None else report.metrics()

    def call(self, call: Call) -> Reply:
        """Do what is asked for, and return the result if this rank reports it."""
        phase, activity = CALLS[type(call)]
        enter_phase(phase)
        begin, reply = time.time(), Reply()
        meter.start()
        if isinstance(call, SyncWeights):
            reply = Reply(metrics=self.sync(call.members, call.version, call.verify))
        elif isinstance(call, Advance):
            stop = self._has_message if call.stoppable else None
            answers = self._replicas.advance(call.prompts, call.wanted, call.version, call.sampling, stop, call.apart)
            if self._leads:  # what the other ranks have is not complete
                reply = Reply.of_answers(answers)
        else:
            scores = self._replicas.score({number: share.whole() for number, share in call.shares.items()})
            if self._leads:
                reply = Reply(scores={**scores})
        return replace(reply, spans=[(activity, begin, time.time())], peak_memory=meter.stop())

    def close(self) -> None:
        """Shut the engine down."""
        self._sync.leave()
        self._replicas.close()
        self._engine.close()  # destroys the groups

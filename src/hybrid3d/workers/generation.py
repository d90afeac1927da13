"""A rank that generates, where other ranks train: what it does for them."""

from __future__ import annotations

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
from hybrid3d.run.metrics import PhaseTimer
from hybrid3d.sync import Sync, policy_sync
from hybrid3d.sync.elastic import ElasticSync
from hybrid3d.watch.work_meter import record as work_record
from hybrid3d.workers.channel import Connection
from hybrid3d.workers.messages import Advance, Call, Reply, Score, SyncWeights

PHASES: dict[type[Call], str] = {SyncWeights: "sync", Advance: "advance", Score: "score"}
ACTIVITIES = {"advance": "generate", "score": "generate"}  # what the rank is busy with in these phases


class GenerationRank:
    """Implements `RoleRank` by one rank of an engine, which is ready when it has had weights.

    An engine is the ranks of `rollout.tp` x `rollout.dp`, and what is lost together: its ranks have process groups of
    their own, apart from those of the syncs.
    """

    def __init__(self, recipe: Recipe, store: Store, ranks: range, start: int):
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
        self._sync.leave()
        self._replicas.reset()
        self._has_message = connection.has_message

    def interrupt(self) -> None:
        self._sync.interrupt()

    def call(self, call: Call) -> Reply:
        timer = PhaseTimer(ACTIVITIES)
        with timer(PHASES[type(call)]):
            reply = self._do(call)
        return replace(reply, spans=timer.spans, peak_memory=max(timer.peaks.values()))

    def _do(self, call: Call) -> Reply:
        if isinstance(call, SyncWeights):
            work_record.begin_step(call.version)
            self._sync.begin(call.members, call.version, call.verify)
            self._sync.bucket_ready(0, last=True)
            report = self._sync.finish()
            self.ready |= report is not None
            return Reply(metrics=None if report is None else report.metrics())
        if isinstance(call, Advance):
            stop = self._has_message if call.stoppable else None
            answers = self._replicas.advance(call.prompts, call.wanted, call.version, call.sampling, stop, call.apart)
            return Reply.of_answers(answers) if self._leads else Reply()  # what the other ranks have is not complete
        scores = self._replicas.score({number: share.whole() for number, share in call.shares.items()})
        return Reply(scores={**scores}) if self._leads else Reply()

    def close(self) -> None:
        self._sync.leave()
        self._replicas.close()
        self._engine.close()  # destroys the groups

"""States which class implements which interface, once, for mypy, which reads this file. Nothing here runs."""

from __future__ import annotations

from typing import Any

from hybrid3d.generation.agents.answers import AgentAnswers
from hybrid3d.generation.engine import Engine
from hybrid3d.generation.replicas import EngineReplicas, Replicas, ReplicaScorer
from hybrid3d.generation.scheduler import Continuation
from hybrid3d.generation.turns import Conversations
from hybrid3d.reshard.ends import Exchange, NoSink, NoSource, PlainSink, PlainSource, WeightSink, WeightSource
from hybrid3d.reshard.exchange import JsonExchange
from hybrid3d.reshard.quantized import Quantized
from hybrid3d.reshard.sources import Compared, Merged, Only
from hybrid3d.rollout.adapters import VllmAdapterSink
from hybrid3d.rollout.engine import RolloutEngine
from hybrid3d.rollout.sink import VllmSink
from hybrid3d.scoring.scorer import FunctionScorer, Given, Scorer
from hybrid3d.sync import Sync, WeightSync
from hybrid3d.sync.compose import ChainedSync
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.value_model import ValueModel
from hybrid3d.train.trained_model import ModelScorer, PolicyModel, ScoringModel, TrainedModel
from hybrid3d.trainer.local_generator import LocalGenerator
from hybrid3d.trainer.remote_generator import RemoteGenerator
from hybrid3d.trainer.trainer import Generator
from hybrid3d.workers.engines import Engines
from hybrid3d.workers.generation import GenerationRank
from hybrid3d.workers.loop import RoleRank
from hybrid3d.workers.reward import OfFirstRank, RewardRank, WorkerScorer

SOURCES: tuple[type[WeightSource], ...] = (PlainSource, NoSource, Only, Merged, Compared, Quantized)
SINKS: tuple[type[WeightSink], ...] = (PlainSink, NoSink, VllmSink, VllmAdapterSink)
EXCHANGES: tuple[type[Exchange], ...] = (JsonExchange,)
SYNCS: tuple[type[Sync], ...] = (WeightSync, ChainedSync)
TRAINED_MODELS: tuple[type[TrainedModel], ...] = (Policy, ValueModel)
POLICIES: tuple[type[PolicyModel], ...] = (Policy,)
SCORING_MODELS: tuple[type[ScoringModel], ...] = (ValueModel,)
ROLLOUT_ENGINES: tuple[type[Engine], ...] = (RolloutEngine,)
CONTINUATIONS: tuple[type[Continuation[Any]], ...] = (Conversations, AgentAnswers)
REPLICAS: tuple[type[Replicas], ...] = (EngineReplicas, Engines)
SCORERS: tuple[type[Scorer], ...] = (FunctionScorer, ReplicaScorer, WorkerScorer, ModelScorer, Given, OfFirstRank)
GENERATORS: tuple[type[Generator], ...] = (LocalGenerator, RemoteGenerator)
WORKERS: tuple[type[RoleRank], ...] = (GenerationRank, RewardRank)

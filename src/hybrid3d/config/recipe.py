"""The recipe: all settings of a run as a frozen dataclass of sections. Nothing is validated here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from hybrid3d.config.schema import Name, Schedule
from hybrid3d.config.sections.engines import Async, Machine, Model, RoleRanks, Rollout, Sync, Train
from hybrid3d.config.sections.learning import Algorithm, Critic, Data, Guard, Optimizer, Reward, Run

Tracker = Literal["tensorboard", "wandb", "mlflow", "prometheus"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, including those that change at a given step. `rollout` is optional for `sft` only."""

    name: Name
    model: Model
    train: Train = Train()
    rollout: Rollout | None = None
    roles: RoleRanks = RoleRanks()
    async_: Async = Async()
    sync: Sync = Sync()
    data: Data
    reward: Reward = Reward()
    algorithm: Algorithm
    optimizer: Optimizer
    critic: Critic = Critic()
    guard: Guard = Guard()
    run: Run
    tracking: tuple[Tracker, ...] = ()
    schedule: Schedule = field(default_factory=dict, hash=False)
    machine: Machine = Machine()

    @property
    def train_ranks(self) -> int:
        """Return the number of ranks that train; EP and ETP regroup these ranks and add none."""
        return self.train.tp * self.train.pp * self.train.cp * self.train.dp

    @property
    def is_split(self) -> bool:
        """Return whether other ranks generate than those that train."""
        return self.roles.generation.ranks is not None

    @property
    def generation_ranks(self) -> int:
        """Return the number of ranks that generate."""
        return self.roles.generation.ranks or self.train_ranks

    @property
    def active_generation_ranks(self) -> int:
        """Return the number of ranks that generate now; the others of `generation_ranks` wait to be needed."""
        return self.roles.generation.active_ranks or self.generation_ranks

    @property
    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self.train_ranks + (self.roles.generation.ranks or 0)

    @property
    def role_ranks(self) -> dict[str, range]:
        """Return the ranks of each role: the same for both, unless other ranks generate than train."""
        first = self.world_size - self.generation_ranks
        return {"train": range(self.train_ranks), "generation": range(first, self.world_size)}

    @property
    def ranks_formula(self) -> str:
        """Return the settings whose result is the total number of ranks."""
        return "train.tp x pp x cp x dp" + (" + roles.generation.ranks" if self.is_split else "")

    @property
    def can_sync_changes(self) -> bool:
        """Return whether, on GPUs, syncs may send only the elements that changed: see `sync.delta`."""
        sleeps = self.rollout is not None and self.rollout.sleep and not self.is_split
        keeps_weights = self.rollout is not None and (self.rollout.keep_weights or not sleeps)
        return self.sync.delta == "auto" and self.model.dtype == "bfloat16" and keeps_weights

    @property
    def overlaps_sync(self) -> bool:
        """Return whether a sync begins during a step's last update: not while ranks generate ahead of it."""
        return self.sync.overlap and not (self.is_split and self.async_.max_staleness)

    @property
    def sequences_per_step(self) -> int:
        """Return the number of sequences that a step trains on, over all data-parallel ranks."""
        samples = self.algorithm.samples_per_prompt if self.algorithm.generates else 1
        return self.algorithm.prompts_per_step * samples

"""The recipe: all settings of a run as a frozen dataclass of sections. Nothing is validated here."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybrid3d.config.schema import Name, Schedule
from hybrid3d.config.sections.algorithm import Algorithm
from hybrid3d.config.sections.engines import Async, Debug, Machine, Model, RewardRole, RoleRanks, Rollout, Sync, Train
from hybrid3d.config.sections.learning import Critic, Data, Evaluation, Guard, Lora, Optimizer, Reward, Run
from hybrid3d.families import is_adapted

Tracker = Literal["tensorboard", "wandb", "mlflow", "prometheus"]

FREED_WEIGHTS = "vLLM frees its weights while it sleeps: set rollout.keep_weights=true"

_ONE_GROUP: dict[str, Any] = {
    "cp": 1,
    "dp": 1,
    "etp": 1,
    "vpp": 1,
    "expert_bias_update_rate": 0.0,
    "first_stage_layers": None,
    "last_stage_layers": None,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of a run, including those that change at a given step. `rollout` is optional for `sft` and `dpo`."""

    name: Name
    model: Model
    lora: Lora | None = None
    train: Train = Train()
    rollout: Rollout | None = None
    roles: RoleRanks = RoleRanks()
    async_: Async = Async()
    sync: Sync = Sync()
    data: Data
    evaluation: Evaluation = Evaluation()
    reward: Reward = Reward()
    algorithm: Algorithm
    optimizer: Optimizer
    critic: Critic = Critic()
    guard: Guard = Guard()
    run: Run
    tracking: tuple[Tracker, ...] = ()
    schedule: Schedule = field(default_factory=dict, hash=False)
    machine: Machine = Machine()
    debug: Debug = Debug()

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
    def late_ranks(self) -> range:
        """Return the ranks that generate and need not be there when the run begins: the last ones."""
        at_start = self.roles.generation.ranks_at_start
        return range(self.sync_ranks if at_start is None else self.train_ranks + at_start, self.sync_ranks)

    @property
    def sync_ranks(self) -> int:
        """Return the number of ranks that train or generate, which take part in syncs."""
        return self.train_ranks + (self.roles.generation.ranks or 0)

    @property
    def world_size(self) -> int:
        """Return the total number of ranks."""
        return self.sync_ranks + (self.roles.reward.ranks or 0)

    @property
    def role_ranks(self) -> dict[str, range]:
        """Return the ranks of each role; those that train also generate, unless others do."""
        return {
            "train": range(self.train_ranks),
            "generation": range(self.sync_ranks - self.generation_ranks, self.sync_ranks),
            "reward": range(self.sync_ranks, self.world_size),
        }

    def role_of(self, rank: int) -> str:
        """Return the role of a rank; "train" if it also generates."""
        return next(role for role, ranks in self.role_ranks.items() if rank in ranks)

    @property
    def worker_roles(self) -> tuple[str, ...]:
        """Return the roles whose ranks do not train."""
        return tuple(role for role, ranks in self.role_ranks.items() if ranks and ranks.start >= self.train_ranks)

    @property
    def has_workers(self) -> bool:
        """Return whether there are ranks that do not train; those that train ask them for samples or rewards."""
        return self.world_size > self.train_ranks

    @property
    def engine_ranks(self) -> int:
        """Return the number of ranks that run an engine, which are the first ones: each takes a GPU, if there are any.

        The others call reward functions.
        """
        return self.sync_ranks if self.reward.model is None else self.world_size

    @property
    def scoring_role(self) -> str:
        """Return the role whose ranks call the function `reward.name`."""
        return "generation" if self.roles.reward.ranks is None else "reward"

    def worker_group_size(self, role: str) -> int:
        """Return how many ranks of a role compute one result together, and are lost together."""
        if role == "reward":
            return self.roles.reward.tp * self.roles.reward.pp
        assert role == "generation", role
        assert self.rollout is not None, "checked when the recipe was read"
        return self.rollout.tp * self.rollout.dp

    @property
    def ranks_formula(self) -> str:
        """Return the settings whose result is the total number of ranks."""
        others = {"roles.generation.ranks": self.is_split, "roles.reward.ranks": self.roles.reward.ranks is not None}
        return " + ".join(["train.tp x pp x cp x dp", *(setting for setting, used in others.items() if used)])

    def without_reward_ranks(self) -> Recipe:
        """Return this recipe without ranks that only compute rewards: `sync_ranks` is then all of them."""
        return replace(self, roles=replace(self.roles, reward=RewardRole()))

    @property
    def reward_layout(self) -> Train:
        """Return the layout of the reward model: that of the policy, or of one group of the ranks that it has."""
        own = self.roles.reward
        if own.ranks is None:
            return self.train
        return replace(self.train, **_ONE_GROUP, tp=own.tp, pp=own.pp, ep=own.ep)

    @property
    def can_sync_changes(self) -> bool:
        """Return whether, on GPUs, syncs may send only the elements that changed: see `sync.delta`."""
        return not self.dense_on_gpus

    @property
    def dense_on_gpus(self) -> str:
        """Why, on GPUs, no sync may send changed elements alone; empty if some may."""
        if self.always_dense:
            return self.always_dense
        if self.rollout is None:
            return "there is no rollout"
        sleeps = self.rollout.sleep and not self.is_split
        return FREED_WEIGHTS if sleeps and not self.keeps_rollout_weights else ""

    @property
    def always_dense(self) -> str:
        """Why no sync may send changed elements alone, whatever the machine; empty if some may."""
        if self.sync.delta == "never":
            return "sync.delta=never"
        if self.model.dtype != "bfloat16":
            return "model.dtype is not bfloat16: nearly all elements change in each update"
        if self.syncs_adapters:
            return "lora.sync=adapter: all that is sent changes"
        if self.merges_adapters and self.sync.delta != "always":
            return "lora.sync=merged: finding the changed elements takes a copy of the sums: set sync.delta=always"
        return ""

    @property
    def compares_changes(self) -> bool:
        """Return whether a sync finds the changed elements by comparison with a copy of what it sent before."""
        return self.merges_adapters and not self.always_dense

    @property
    def merges_adapters(self) -> bool:
        """Return whether vLLM gets the sums of the policy's own weights and its adapters."""
        return self.lora is not None and self.lora.sync == "merged"

    def adapts(self, name: str, dims: int) -> bool:
        """Return whether the policy has an adapter of a canonical tensor of so many dims."""
        return self.lora is not None and is_adapted(name, dims, self.lora.target_modules)

    @property
    def keeps_rollout_weights(self) -> bool:
        """Return whether vLLM's weights stay on the GPU while it sleeps: with adapters they are sent only once."""
        return self.rollout is not None and (self.rollout.keep_weights or self.syncs_adapters)

    @property
    def syncs_adapters(self) -> bool:
        """Return whether vLLM gets the policy's own weights once, and then its adapters alone."""
        return self.lora is not None and self.lora.sync == "adapter"

    @property
    def holds_reference(self) -> bool:
        """Return whether ranks have weights of a reference: not those of a server, nor those below adapters."""
        kl = self.algorithm.kl
        is_base = self.lora is not None and kl.reference is None
        return self.algorithm.uses_reference and kl.endpoint is None and not is_base

    @property
    def quantizes(self) -> bool:
        """Return whether vLLM generates with quantized weights."""
        return self.rollout is not None and self.rollout.quantization is not None

    @property
    def overlaps_sync(self) -> bool:
        """Return whether a sync begins during a step's last update: not while ranks generate ahead of it."""
        return self.sync.overlap and self.lora is None and not (self.is_split and self.async_.max_staleness)

    @property
    def sequences_per_step(self) -> int:
        """Return the number of sequences that a step trains on, over all data-parallel ranks."""
        return self.algorithm.prompts_per_step * self.algorithm.answers_per_prompt

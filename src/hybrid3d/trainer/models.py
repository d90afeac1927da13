"""The models of a run in the train layout: the policy, its reference, the critic and the reward model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hybrid3d.config import Recipe, Train
from hybrid3d.inputs.models import read_config
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron.model import MegatronModel
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.value_model import ValueModel
from hybrid3d.trainer.teacher import ServedTeacher


@dataclass(frozen=True)
class BaseOfPolicy:
    """A policy without its adapters, as a reference that takes no memory of its own."""

    policy: Policy

    def logprobs(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return what `Policy.logprobs` of the model without adapters returns."""
        with self.policy.as_base():
            return self.policy.logprobs(batch, recipe)


@dataclass(frozen=True)
class Models:
    """The models that a recipe needs; this rank has its shards of each.

    Attributes:
        policy: the language model that is trained.
        reference: the frozen initial policy, the checkpoint `algorithm.kl.reference`, or the server
            `algorithm.kl.endpoint`; of a policy with adapters by default the policy without them.
        critic: PPO's value model, which is trained too.
        reward_model: scores samples instead of a reward function; None also where ranks of its own have it.
    """

    policy: Policy
    reference: Policy | BaseOfPolicy | ServedTeacher | None
    critic: ValueModel | None
    reward_model: ValueModel | None

    @classmethod
    def of(cls, recipe: Recipe, policy: Policy, group: dist.ProcessGroup) -> Models:
        """Build the models that the recipe needs besides the policy."""
        rank = group.rank()
        reference: Policy | BaseOfPolicy | ServedTeacher | None = None
        if recipe.algorithm.kl.endpoint is not None:
            reference = ServedTeacher(recipe, policy, group)
        elif recipe.algorithm.uses_reference:
            reference = reference_of(recipe, policy, rank)
        critic = reward_model = None
        if recipe.algorithm.uses_critic:
            path = recipe.critic.path or recipe.model.path
            critic = ValueModel(read_config(path), recipe, rank, recipe.critic.optimizer or recipe.optimizer, path)
        if recipe.reward.model is not None and recipe.roles.reward.ranks is None:
            reward_model = ValueModel(read_config(recipe.reward.model), recipe, rank, path=recipe.reward.model)
        return cls(policy, reference, critic, reward_model)

    @property
    def trained(self) -> dict[str, MegatronModel]:
        """The models that checkpoints save, by name."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def _all(self) -> list[MegatronModel]:
        models = (self.policy, self.reference, self.critic, self.reward_model)
        return [model for model in models if isinstance(model, MegatronModel)]

    def offload(self, train: Train) -> None:
        """Free the memory that `train.offload_*` selects; each model reallocates it when it is used."""
        for model in self._all:
            model.offload(train)


def reference_of(recipe: Recipe, policy: Policy, rank: int) -> Policy | BaseOfPolicy:
    """Build the reference of a policy: see `Models`."""
    if not recipe.holds_reference:
        return BaseOfPolicy(policy)
    path = recipe.algorithm.kl.reference or recipe.model.path
    config = policy.config if path == recipe.model.path else read_config(path)
    return Policy(config, recipe, rank, path, trainable=False)

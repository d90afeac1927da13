"""The models of a run: the policy, and what a recipe needs beside it; all in the train layout."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.inputs.models import read_config
from hybrid3d.train.critic import ValueModel
from hybrid3d.train.policy import Policy
from hybrid3d.train.trained import MegatronModel


@dataclass(frozen=True)
class Models:
    """Those that a rank has a part of; the critic is trained too, the judge gives rewards."""

    policy: Policy
    reference: Policy | None
    critic: ValueModel | None
    judge: ValueModel | None

    @classmethod
    def of(cls, recipe: Recipe, policy: Policy, rank: int) -> Models:
        """What a recipe needs beside the policy."""
        refers = recipe.algorithm.kl.where != "none"
        reference = Policy(policy.config, recipe, rank, trainable=False) if refers else None
        critic = judge = None
        if recipe.algorithm.critic:
            path = recipe.critic.path or recipe.model.path
            critic = ValueModel(read_config(path), recipe, rank, recipe.critic.optimizer or recipe.optimizer, path)
        if recipe.reward.model is not None:
            judge = ValueModel(read_config(recipe.reward.model), recipe, rank, path=recipe.reward.model)
        return cls(policy, reference, critic, judge)

    @property
    def trained(self) -> dict[str, MegatronModel]:
        """What a checkpoint must have, by name."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def _all(self) -> list[MegatronModel]:
        return [m for m in (self.policy, self.reference, self.critic, self.judge) if m is not None]

    def adopt(self, recipe: Recipe) -> None:
        """Go on by the settings of this recipe."""
        for model in self._all:
            model.adopt(recipe)

    def offload(self) -> None:
        """Free what only training needs and the recipe offloads, while vLLM generates."""
        for model in self._all:
            model.offload()

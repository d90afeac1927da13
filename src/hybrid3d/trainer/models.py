"""The models of a run in the train layout: the policy, its reference, the critic and the reward model.

A server may compute a teacher's log-probabilities of a batch's tokens; they arrive on the ranks that use them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe, Train
from hybrid3d.distributed import gather_objects
from hybrid3d.inputs.completions import Completions, EndpointError
from hybrid3d.inputs.models import read_config
from hybrid3d.reshard.move.device import device
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.value_model import ValueModel
from hybrid3d.train.trained_model import PolicyModel, ScoringModel, TrainedModel

T = TypeVar("T")

SEQUENCES_PER_REQUEST, REQUESTS_AT_ONCE = 8, 8


class ServedTeacher:
    """A reference whose log-probabilities a server computes (`algorithm.kl.endpoint`).

    One rank of each data-parallel replica asks for the replica's sequences and gives what it gets to the others.
    """

    def __init__(self, recipe: Recipe, policy: PolicyModel, group: dist.ProcessGroup):
        """Ask the server for its model's name; raises as `logprobs`."""
        url = recipe.algorithm.kl.endpoint
        assert url is not None, "built where the recipe has one"
        self._server, self._policy, self._group = Completions(url, "algorithm.kl.endpoint"), policy, group
        self._model = self._agree(self._server.model) or ""

    def logprobs(self, batch: Batch, recipe: Recipe) -> Tensor | None:
        """Return the log-probability of every token given those before it, [B, T], 0 after a sequence's end.

        None on ranks without the output layer. Every rank of the run calls it.

        Raises:
            EndpointError: on every rank, if one of them gets no answer.
        """
        found = torch.zeros(batch.tokens.shape, dtype=torch.float32)
        self._agree(lambda: self._fill(found, batch))
        if not self._policy.has_output:
            return None
        found = found.to(device())
        self._policy.spread(found)
        return found

    def _agree(self, ask: Callable[[], T]) -> T | None:
        """Call a function on the ranks that ask, and raise on all ranks the first error that one of them gets."""
        said, answer = "", None
        if self._policy.is_reporting_rank:
            try:
                answer = ask()
            except EndpointError as error:
                said = str(error)
        errors = [*filter(None, gather_objects(said, self._group))]
        if errors:
            raise EndpointError(errors[0])
        return answer

    def _fill(self, found: Tensor, batch: Batch) -> None:
        """Write the log-probabilities of a batch's sequences into `found`, [B, T]."""
        rows = [tokens[:length].tolist() for tokens, length in zip(batch.tokens, batch.lengths.tolist(), strict=True)]
        parts = [rows[i : i + SEQUENCES_PER_REQUEST] for i in range(0, len(rows), SEQUENCES_PER_REQUEST)]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            answers = threads.map(lambda part: self._server.logprobs(self._model, part), parts)
            for row, values in enumerate(chain.from_iterable(answers)):
                found[row, : len(values)] = torch.tensor(values)


@dataclass(frozen=True)
class BaseOfPolicy:
    """A policy without its adapters, as a reference that takes no memory of its own."""

    policy: PolicyModel

    def logprobs(self, batch: Batch, recipe: Recipe) -> torch.Tensor | None:
        """Return what `PolicyModel.logprobs` of the model without adapters returns."""
        with self.policy.as_base():
            return self.policy.logprobs(batch, recipe)


Reference = PolicyModel | BaseOfPolicy | ServedTeacher


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

    policy: PolicyModel
    reference: Reference | None
    critic: ScoringModel | None
    reward_model: ScoringModel | None

    @classmethod
    def of(cls, recipe: Recipe, policy: PolicyModel, group: dist.ProcessGroup) -> Models:
        """Build the models that the recipe needs besides the policy."""
        rank = group.rank()
        reference: Reference | None = None
        if recipe.algorithm.kl.endpoint is not None:
            reference = ServedTeacher(recipe, policy, group)
        elif recipe.algorithm.uses_reference:
            reference = reference_of(recipe, policy, rank)
        critic = reward_model = None
        if recipe.algorithm.uses_critic:
            path, optimizer = recipe.critic.path or recipe.model.path, recipe.critic.optimizer or recipe.optimizer
            critic = ValueModel(read_config(path), recipe, rank, optimizer, path)
        if recipe.reward.model is not None and recipe.roles.reward.ranks is None:
            reward_model = ValueModel(read_config(recipe.reward.model), recipe, rank, path=recipe.reward.model)
        return cls(policy, reference, critic, reward_model)

    @property
    def trained(self) -> dict[str, TrainedModel]:
        """The models that checkpoints save, by name."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

    @property
    def _all(self) -> list[TrainedModel]:
        found: list[TrainedModel | None] = [self.policy, self.critic, self.reward_model]
        found += [] if isinstance(self.reference, BaseOfPolicy | ServedTeacher) else [self.reference]
        return [model for model in found if model is not None]

    def offload(self, train: Train) -> None:
        """Free the memory that `train.offload_*` selects; each model reallocates it when it is used."""
        for model in self._all:
            model.offload(train)


def reference_of(recipe: Recipe, policy: PolicyModel, rank: int) -> PolicyModel | BaseOfPolicy:
    """Build the reference of a policy: see `Models`."""
    if not recipe.holds_reference:
        return BaseOfPolicy(policy)
    path = recipe.algorithm.kl.reference or recipe.model.path
    config = policy.config if path == recipe.model.path else read_config(path)
    return Policy(config, recipe, rank, path, trainable=False)

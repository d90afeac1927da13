"""A teacher that a server computes: the log-probabilities of a batch's tokens, on the ranks that use them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor

from hybrid3d.config import Recipe
from hybrid3d.distributed import gather_objects
from hybrid3d.inputs.completions import Completions, EndpointError
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron.policy import Policy
from hybrid3d.train.megatron.runtime import device, groups_by_axis

SEQUENCES_PER_REQUEST, REQUESTS_AT_ONCE = 8, 8


class ServedTeacher:
    """A reference whose log-probabilities a server computes (`algorithm.kl.endpoint`).

    One rank of each data-parallel replica asks for the replica's sequences and gives what it gets to the others.
    """

    def __init__(self, recipe: Recipe, policy: Policy, group: dist.ProcessGroup):
        """Ask the server for its model's name.

        Raises:
            EndpointError: on every rank, if one of them gets no answer.
        """
        url = recipe.algorithm.kl.endpoint
        assert url is not None, "built where the recipe has one"
        self._server, self._policy, self._group = Completions(url, "algorithm.kl.endpoint"), policy, group
        self._model = ""
        self._agree(self._ask_name)

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
        found, axes = found.to(device()), groups_by_axis()
        for axis in ("cp", "tp"):  # those who lead their TP group get it first
            dist.broadcast(found, group=axes[axis], group_src=0)
        return found

    def _agree(self, ask: Callable[[], None]) -> None:
        """Call a function on the ranks that ask, and raise on all ranks the first error that one of them gets."""
        said = ""
        if self._policy.is_reporting_rank:
            try:
                ask()
            except EndpointError as error:
                said = str(error)
        errors = [*filter(None, gather_objects(said, self._group))]
        if errors:
            raise EndpointError(errors[0])

    def _ask_name(self) -> None:
        self._model = self._server.model()

    def _fill(self, found: Tensor, batch: Batch) -> None:
        """Write the log-probabilities of a batch's sequences into `found`, [B, T]."""
        rows = [tokens[:length].tolist() for tokens, length in zip(batch.tokens, batch.lengths.tolist(), strict=True)]
        parts = [rows[i : i + SEQUENCES_PER_REQUEST] for i in range(0, len(rows), SEQUENCES_PER_REQUEST)]
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
            answers = threads.map(lambda part: self._server.logprobs(self._model, part), parts)
            for row, values in enumerate(chain.from_iterable(answers)):
                found[row, : len(values)] = torch.tensor(values)

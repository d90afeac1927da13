"""Router replay: the policy's routers of experts choose what was chosen before, by vLLM or in an earlier pass.

Only the choice is replayed. The weights of the chosen experts come from the router's own scores, with their gradients:
Megatron's routing calls `get_replay_topk` in place of top-k, before it normalizes, and counts tokens of experts after.

Megatron's own `RouterReplay` (`transformer/moe/router_replay.py`) has a choice for every token or for none, and one
list for all models of a process; `RouterChoices` has its interface.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe.router import TopKRouter

from hybrid3d.families import Experts
from hybrid3d.rl.batch import Batch
from hybrid3d.train.megatron.context import gather_shares, tensor_parallel_share
from hybrid3d.train.megatron.versions import set_in_megatron
from hybrid3d.train.micro_batches import MicroBatch


class RouterChoices:
    """What one router chooses, in place of Megatron's `RouterReplay`.

    Attributes:
        given: the choices for the tokens that are computed now, [tokens, k], -1 where the router chooses itself; None
            where it always does.
        made: the choices of the last pass, [tokens, k].
        recomputed: the choices of micro batches whose layers are computed again in their backward passes, in order;
            None where no layer is computed twice.
        equal: how many of the given choices the router would have made itself, since `counts` was set.
    """

    def __init__(self) -> None:
        self.given: torch.Tensor | None = None
        self.made: torch.Tensor
        self.recomputed: deque[torch.Tensor | None] | None = None
        self.counts = False
        self.equal: torch.Tensor | int = 0

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and the experts of each token, [tokens, k]; the arguments are Megatron's."""
        assert default_compute_topk is not None
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given, self.made = self.given, own
        if self.recomputed is not None:  # with full recomputation a layer's first pass has no gradients
            if torch.is_grad_enabled():
                given = self.recomputed.popleft()
            else:
                self.recomputed.append(given)
        if given is None:
            return values, own
        if self.counts:
            self.equal += (own[:, :, None] == given[:, None, :]).sum()
        self.made = torch.where(given < 0, own, given.to(own.dtype))
        return scores.gather(1, self.made), self.made


class RouterReplay:
    """Replays choices in all routers of a model, and records them, over all ranks that it is distributed to.

    Attributes:
        shape: the number of layers with experts, and the number of experts of a token.
        recorded: the choices of the last pass if it was recorded, [B, T, layers, k] int16, -1 at layers of other ranks.
    """

    def __init__(self, stages: Sequence[GPTModel], experts: Experts, records: bool):
        """Replace the routers' choices in this rank's virtual stages; `records`: in passes without a backward pass."""
        self.shape, self._records = (sum(experts.sparse), experts.per_token), records
        self._routers: list[dict[int, RouterChoices]] = []  # of each stage, by index among the layers with experts
        for stage in stages:
            routers = [module for module in stage.decoder.modules() if isinstance(module, TopKRouter)]
            for router in routers:
                set_in_megatron(router, router_replay=RouterChoices())
            numbered = {sum(experts.sparse[: router.layer_number - 1]): router.router_replay for router in routers}
            self._routers.append(numbered)
        self._splits_sequences = stages[0].config.sequence_parallel
        self.recorded: torch.Tensor | None = None

    def begin(self, batch: Batch, *, forward_only: bool, recomputes: bool) -> None:
        """Prepare for the micro batches of a batch.

        Args:
            forward_only: no backward pass follows. Choices are compared with those that are given.
            recomputes: each layer is computed again in the backward pass.
        """
        self.recorded = None
        if forward_only and self._records:
            shape = *batch.tokens.shape, *self.shape
            self.recorded = torch.full(shape, -1, dtype=torch.int16, device=batch.tokens.device)
        for routers in self._routers:
            for router in routers.values():
                router.counts, router.equal = forward_only, 0
                router.recomputed = deque() if recomputes and not forward_only else None

    @contextmanager
    def micro_batch(self, stage: int, micro: MicroBatch) -> Iterator[None]:
        """Replay the choices of a micro batch while one of this rank's virtual stages computes it."""
        routers = self._routers[stage]
        given = None if micro.experts is None else self._local(micro.share(micro.experts))
        for layer, router in routers.items():
            router.given = None if given is None else given[:, layer]
        try:
            yield
        finally:
            for router in routers.values():  # a reference of the same model chooses itself
                router.given = None
        if self.recorded is not None and routers:
            made = self._whole(torch.stack([router.made for router in routers.values()], 1), micro)
            index = torch.tensor(list(routers), device=made.device)
            recorded = self.recorded[micro.rows]
            recorded[:, :, index] = micro.unpacked(made)
            self.recorded[micro.rows] = recorded

    def equal_choices(self) -> int:
        """Return how many given choices this rank's routers would have made themselves in that pass."""
        return int(sum(router.equal for routers in self._routers for router in routers.values()))

    def _local(self, experts: torch.Tensor) -> torch.Tensor:
        """Return the choices [tokens, layers, k] for the tokens of this rank's routers, which are [T', b] in memory."""
        by_position = experts.transpose(0, 1)
        return (tensor_parallel_share(by_position, 0) if self._splits_sequences else by_position).flatten(0, 1)

    def _whole(self, made: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        """Return the choices of all TP and CP ranks [tokens, layers, k] as [b, T', layers, k] int16."""
        made = made.to(torch.int16)
        if self._splits_sequences:
            made = gather_shares(made, parallel_state.get_tensor_model_parallel_group()).flatten(0, 1)
        rows = len(micro.tokens)
        return micro.whole(made.unflatten(0, (-1, rows)).transpose(0, 1))

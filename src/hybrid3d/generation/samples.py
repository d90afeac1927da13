"""What generation gives: samples, a step's batch of them, and the result of an evaluation. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sample:
    """One answer to one prompt, and its reward.

    Attributes:
        tokens: of the answer, what an environment wrote in it included.
        own: whether each is the policy's.
        logprobs: at which vLLM drew the policy's.
        weights: the number of updates that the weights which it was drawn with have behind them.
    """

    prompt: str
    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    answer: str
    reward: float
    weights: int

    @property
    def num_loss_tokens(self) -> int:
        """How many of the tokens are the policy's."""
        return sum(self.loss_mask)

    @property
    def turns(self) -> int:
        """How often the policy had its say."""
        return sum(mine and not before for before, mine in zip((False, *self.loss_mask), self.loss_mask, strict=False))


@dataclass(frozen=True)
class RolloutBatch:
    """The samples of a step, on every rank.

    Attributes:
        samples: `samples_per_prompt` in a row for each prompt.
        batches: of prompts that were drawn for them.
        zero_variance_groups: groups whose rewards are all equal, over all that were drawn.
        failures: rewards that failed, and conversations that an environment failed in, by kind, over all that were
            drawn; `examples` has what one of each said.
    """

    samples: list[Sample]
    batches: int
    zero_variance_groups: int
    failures: dict[str, int] = field(default_factory=dict)
    examples: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResult:
    """Greedy answers to the held-out problems.

    Attributes:
        accuracy: the share of them with full reward, which is 1.
        reward: the mean of their rewards.
        failures, examples: as in `Drawn`.
    """

    accuracy: float
    reward: float
    failures: dict[str, int]
    examples: dict[str, str]

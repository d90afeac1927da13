"""The tokens of an answer that is being generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hybrid3d.generation.engine import Completion
from hybrid3d.generation.router_replay import NO_CHOICES, ExpertChoices
from hybrid3d.generation.samples import Sample
from hybrid3d.rl.data import Example


@dataclass(eq=False, kw_only=True)
class AnswerTokens:
    """The tokens that follow a prompt: those that the policy generated, and what was written between them.

    Attributes:
        tokens: of the policy and of others.
        loss_mask: whether the policy generated each token.
        logprobs: of the policy's tokens, by vLLM; empty where it is greedy.
        kept: for each of them, the probability of the tokens that could be sampled; empty where all could.
        versions: of the weights that generated each token; the tokens of others have those of the token before.
        experts: of the first tokens of the prompt and of these.
        truncated: whether more would follow if there were room for it.
    """

    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    experts: ExpertChoices = NO_CHOICES
    truncated: bool = False

    def append_generated(self, completion: Completion) -> None:
        """Append tokens that the policy generated."""
        self._append(completion.tokens, True, completion.weight_version)
        self.logprobs += completion.logprobs
        self.kept += completion.kept
        self.truncated = completion.truncated
        self.experts = self.experts.extended(completion.experts)  # where it was computed twice, the first time counts

    def append_written(self, tokens: Sequence[int]) -> None:
        """Append tokens that others wrote, after tokens of the policy."""
        self._append(tokens, False, self.versions[-1])

    def truncate(self, length: int) -> None:
        """Remove all tokens but the first `length`."""
        generated = sum(self.loss_mask[:length])
        del self.tokens[length:], self.loss_mask[length:], self.versions[length:]
        del self.logprobs[generated:], self.kept[generated:]

    def sample(
        self, example: Example, prompt_ids: Sequence[int], answer: str, reward: float = 0.0, branch: int = 0
    ) -> Sample:
        """Return the sample of these tokens; arguments are as in `Sample`."""
        return Sample(
            prompt=example.prompt,
            prompt_ids=tuple(prompt_ids),
            tokens=tuple(self.tokens),
            loss_mask=tuple(self.loss_mask),
            logprobs=tuple(self.logprobs),
            answer=answer,
            reward=reward,
            versions=tuple(self.versions),
            reference=example.answer,
            row=example.row,
            branch=branch,
            truncated=self.truncated,
            kept_probability=sum(self.kept) / len(self.kept) if self.kept else 1.0,
            experts=self.experts.first(len(prompt_ids) + len(self.tokens)),  # of what a stop has left
        )

    def _append(self, tokens: Sequence[int], loss_mask: bool, version: int) -> None:
        self.tokens += tokens
        self.loss_mask += [loss_mask] * len(tokens)
        self.versions += [version] * len(tokens)

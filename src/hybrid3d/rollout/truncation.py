"""Log-probabilities of the distribution over all tokens, where vLLM samples from a part of them.

vLLM's log-probabilities are those of the distribution that it samples: after `top_p`, `top_k` and `min_p`. Training
computes those of the whole distribution. A request with `logprobs=1` gets both: the number of the sampled token is that
of the whole distribution, and the place of the alternative has the one of the distribution that was sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

LOGPROBS = 1  # `SamplingParams.logprobs` of the requests that get both numbers; others have 0
ROWS = 64  # of logits that are computed with at a time


def kept_probability(logprobs: Mapping[int, Any], token: int) -> float | None:
    """Return the probability of all tokens that could be sampled, by a sampled token's logprobs; None if all could."""
    sampled_from = next((one.logprob for other, one in logprobs.items() if other != token), None)
    return None if sampled_from is None else min(1.0, math.exp(logprobs[token].logprob - sampled_from))


def first_runner(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `Sampler.forward` of vLLM's first model runner, which CPUs have, with both numbers."""

    def with_both(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        if sampling_metadata.max_num_logprobs != LOGPROBS or sampling_metadata.temperature is None:
            return forward(self, logits, sampling_metadata, *args, **kwargs)
        all_logits = logits.clone()  # sampling writes to it
        output = forward(self, logits, sampling_metadata, *args, **kwargs)
        return _with_both(output, all_logits, sampling_metadata.temperature)

    return with_both


def second_runner(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `Sampler.__call__` of vLLM's second model runner, which GPUs have, with both numbers."""

    def with_both(self: Any, logits: torch.Tensor, input_batch: Any) -> Any:
        dims = self.get_logprobs_dims(input_batch.idx_mapping_np)
        output = call(self, logits, input_batch)  # which computes with a copy of the logits where it truncates
        if dims is None or dims[0] != LOGPROBS:
            return output
        return _with_both(output, logits, self.sampling_states.temperature.gpu[input_batch.expanded_idx_mapping])

    return with_both


def _with_both(output: Any, logits: torch.Tensor, temperature: torch.Tensor) -> Any:
    """Return a sampler's output with both log-probabilities of each sampled token.

    Args:
        logits: [n, vocabulary], of the model.
        temperature: [n], at which each row was sampled; 0 where it was greedy.
    """
    tensors, tokens = output.logprobs_tensors, output.sampled_token_ids.flatten().long()
    whole = token_logprobs(logits, temperature, tokens)
    ids = torch.stack([tokens, (tokens == 0).long()], 1)  # any token but the one that was sampled
    logprobs = torch.stack([whole, tensors.logprobs[:, 0]], 1)
    output.logprobs_tensors = tensors._replace(
        logprob_token_ids=ids.to(tensors.logprob_token_ids.dtype), logprobs=logprobs
    )
    return output


def token_logprobs(logits: torch.Tensor, temperature: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return [n], the log-probability of each row's token in the distribution over all tokens at its temperature."""
    temperature = torch.where(temperature > 0, temperature, 1.0)
    found = []
    for rows, divisor, ids in zip(logits.split(ROWS), temperature.split(ROWS), tokens.split(ROWS), strict=True):
        scaled = rows.float() / divisor[:, None]
        found.append(scaled.gather(1, ids[:, None])[:, 0] - scaled.logsumexp(1))
    return torch.cat(found)

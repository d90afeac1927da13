"""How long what an agent sends may be, which is checked before it is tokenized."""

from __future__ import annotations

from hybrid3d.config import Rollout
from hybrid3d.generation.agents.history import Call, PromptTokens, RefusedCall


def check_length(call: Call, rollout: Rollout, longest: int) -> None:
    """Check that a prompt may fit, by its tokens or by the characters that so many tokens have at most.

    Args:
        longest: characters of the longest token.

    Raises:
        RefusedCall: it cannot.
    """
    prompt, most = call.prompt, rollout.max_model_len
    given = prompt.ids if isinstance(prompt, PromptTokens) else prompt.text
    unit, limit = ("tokens", most) if isinstance(prompt, PromptTokens) else ("characters", most * longest)
    if len(given) > limit:
        problem = f"the prompt has {len(given)} {unit}, and rollout.max_model_len={most} leaves room for {limit}"
        raise RefusedCall(problem, "context_length_exceeded", "messages" if call.is_chat else "prompt")

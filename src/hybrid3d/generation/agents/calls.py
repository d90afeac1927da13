"""The calls of agents, and why some are refused."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid3d.config import Rollout
from hybrid3d.generation.agents.history import Prompt, PromptText


class RefusedCall(ValueError):
    """A call that cannot be made; `code` is OpenAI's for it."""

    def __init__(self, message: str, code: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


class NoSession(RefusedCall):
    """There is no session of this id, or it has ended."""

    def __init__(self) -> None:
        super().__init__("there is no such session: it has ended, or its agent was silent too long", "no_session")


class RunEnded(RuntimeError):
    """The run has ended: there are no more sessions."""


@dataclass(frozen=True)
class Call:
    """What an agent asks for.

    Attributes:
        max_tokens: of the reply at most; None: as many as there is room for.
        stops: texts that end the reply.
        include_stop: whether the reply has the stop that ended it.
    """

    prompt: Prompt
    max_tokens: int | None = None
    stops: tuple[str, ...] = ()
    include_stop: bool = False

    @property
    def is_chat(self) -> bool:
        """Whether its prompt is messages."""
        return isinstance(self.prompt, PromptText) and self.prompt.messages is not None


@dataclass(frozen=True)
class CallResult:
    """The answer to a call.

    Attributes:
        prompt_ids: the tokens that it was generated after.
        tokens: that were generated, the one that ended it included.
        logprobs: of these; empty where the session is greedy.
        text: the reply.
        finish_reason: `stop` or `length`.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    finish_reason: str


def no_room(context: int, answer: int, rollout: Rollout, is_chat: bool) -> RefusedCall:
    """Return why a prompt of so many tokens leaves no room for a reply; `answer` of them follow its branch's prompt."""
    param = "messages" if is_chat else "prompt"
    if not context:
        return RefusedCall("the prompt has no tokens", "invalid_prompt", param)
    problem = f"the prompt has {context} tokens, and rollout.max_model_len={rollout.max_model_len} leaves no room"
    if context < rollout.max_model_len:
        limit = f"rollout.max_new_tokens={rollout.max_new_tokens}"
        problem = f"{answer} tokens follow the prompt of the branch, and {limit} leaves no room"
    return RefusedCall(f"{problem} for a reply: end the session", "context_length_exceeded", param)

"""The samples of agents' sessions."""

from __future__ import annotations

from typing import Any

from hybrid3d.generation.agents.sessions import Session
from hybrid3d.generation.samples import Sample


def samples_of(session: Session, tokenizer: Any) -> list[Sample]:
    """Return a sample for each branch of a session that has ended, without rewards.

    A session without a call has one that training learns nothing from.
    """
    example = session.example
    samples = [
        Sample(
            prompt=example.prompt,
            prompt_ids=branch.prompt_ids,
            tokens=tuple(branch.tokens),
            loss_mask=tuple(branch.loss_mask),
            logprobs=tuple(branch.logprobs),
            answer=tokenizer.decode(branch.tokens, skip_special_tokens=True),
            reward=0.0,
            versions=tuple(branch.versions),
            reference=example.answer,
            branch=number,
        )
        for number, branch in enumerate(session.history.branches)
    ]
    nothing = Sample(
        prompt=example.prompt,
        prompt_ids=example.prompt_ids,
        tokens=(tokenizer.eos_token_id,),
        loss_mask=(False,),
        logprobs=(),
        answer="",
        reward=0.0,
        versions=(session.version,),
        reference=example.answer,
    )
    return samples or [nothing]


def last_answer(session: Session, samples: list[Sample]) -> str:
    """Return the text that a reward function scores: that of the branch in which the agent got its last reply."""
    last = session.history.last
    return "" if last is None else samples[session.history.branches.index(last)].answer

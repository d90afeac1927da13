"""The samples of agents' sessions."""

from __future__ import annotations

from typing import Any

from hybrid3d.generation.agents.sessions import Session
from hybrid3d.generation.samples import Sample
from hybrid3d.generation.tokens import AnswerTokens
from hybrid3d.rl.token_texts import decode_part


def samples_of(session: Session, tokenizer: Any) -> list[Sample]:
    """Return a sample for each branch of a session that has ended, without rewards.

    A session without a call has one that training learns nothing from.
    """
    example, branches = session.example, session.history.branches
    if not branches:
        nothing = AnswerTokens(tokens=[tokenizer.eos_token_id], loss_mask=[False], versions=[session.version])
        return [nothing.sample(example, example.prompt_ids, "")]
    return [
        branch.sample(
            example, branch.prompt_ids, decode_part(tokenizer, branch.tokens, branch.prompt_ids), branch=number
        )
        for number, branch in enumerate(branches)
    ]


def last_answer(session: Session, samples: list[Sample]) -> str:
    """Return the text that a reward function scores: that of the branch in which the agent got its last reply."""
    last = session.history.last
    return "" if last is None else samples[session.history.branches.index(last)].answer

"""Which of the prompts that were answered a step trains, and what failed on the way to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hybrid3d.generation.samples import Sample


class Failures:
    """Conversations and rewards that failed, by kind, and an example of each kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, counts: Mapping[str, int], examples: Mapping[str, str]) -> None:
        self.counts.update(counts)
        self.examples = {**examples, **self.examples}


class Selection:
    """The prompts that were answered for a step, of which it trains as many as are wanted.

    Groups of a prompt's samples with equal rewards have zero advantages: further prompts are answered to replace them
    (DAPO, arXiv 2503.14476, section 3.2). Where they still do not suffice, such groups fill the batch.

    Args:
        extra: how many times as many prompts as are wanted may be answered further.

    Attributes:
        greedy: answers that are trained on by nobody, which a reward model scores later.
        zero_variance: the number of groups with equal rewards.
    """

    def __init__(self, wanted: int, extra: int):
        self.failures = Failures()
        self.greedy: list[Sample] = []
        self.zero_variance = 0
        self._wanted, self._extra = wanted, extra
        self._groups: list[list[Sample]] = []  # the answers to a prompt, with all their branches
        self._found: list[int] = []
        self._fillers: list[int] = []

    @property
    def prompts(self) -> int:
        """How many prompts were answered."""
        return len(self._groups)

    @property
    def missing(self) -> int:
        """How many prompts are still to be answered."""
        most = self._wanted * (1 + self._extra)
        return max(0, min(self._wanted - len(self._found), most - len(self._groups)))

    def add(self, answers: Sequence[Sequence[Sample]], has_zero_variance: bool) -> None:
        """Add all answers to a prompt."""
        (self._fillers if has_zero_variance and self._extra else self._found).append(len(self._groups))
        self._groups.append([branch for answer in answers for branch in answer])
        self.zero_variance += has_zero_variance

    def samples(self) -> list[Sample]:
        """Return the samples that are trained."""
        # In the order of generation, so that no minibatch has fillers only
        chosen = sorted([*self._found, *self._fillers][: self._wanted])
        return [sample for index in chosen for sample in self._groups[index]]

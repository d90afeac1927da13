"""The recipe's section about evaluation on held-out problems."""

from __future__ import annotations

from dataclasses import dataclass, field

from hybrid3d.config.schema import FilePath, PositiveFraction, Repeats, TemperatureOrZero


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How held-out problems are answered: before, during (`run.eval_every`) and after training, and by `hybrid3d eval`.

    Attributes:
        samples: Answers per problem, n.
        temperature: Temperature of these answers; with 0 they are greedy.
        top_p: Of these answers, as `rollout.top_p`.
        k: With n > 1, the numbers of answers for which `eval/pass@k` is estimated (arXiv 2107.03374, eq. 1), each at
            most n; `[]`: n.
        data: More files with held-out problems, by name, with the columns of `data.eval`; their metrics are
            `eval/NAME/...`.
    """

    samples: Repeats = 1
    temperature: TemperatureOrZero = 0.0
    top_p: PositiveFraction = 1.0
    k: tuple[Repeats, ...] = ()
    data: dict[str, FilePath] = field(default_factory=dict, hash=False)

    @property
    def ks(self) -> tuple[int, ...]:
        """Return the numbers of answers for which `pass@k` is estimated."""
        return () if self.samples == 1 else self.k or (self.samples,)

"""A run that looks after itself: what is said when a metric leaves its bounds, and what is done about faults."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.rl.kl import KlController
from hybrid3d.run.record import Record

REMEMBERED = 20  # norms of gradients, of which the median is what is usual
USUAL_AFTER = 5  # of them

# Mean |difference| of a sampled token's log-probability, training against vLLM, in nats, that rounding in a dtype
# explains: without experts, and with them, because rounding may send a token to other experts. A mean, because one
# token that rounding hits hard hardly moves it. `docs/algorithms.md` says what was measured.
EXPLAINED_MISMATCH = {"float32": (0.05, 0.05), "bfloat16": (0.15, 0.4)}


class TooManyInterventions(RuntimeError):
    """A run needed more help than its recipe allows."""

    raised_on_all_ranks = True  # every rank raises it: one of them is enough to tell


class EngineMismatch(RuntimeError):
    """Training and vLLM do not compute the same model."""

    raised_on_all_ranks = True  # every rank raises it


@dataclass(frozen=True)
class Bound:
    """A setting of the recipe's `guard`, the metric that it bounds, and what to do where that is left."""

    setting: str
    metric: str
    advice: str

    def left(self, value: float, bound: float) -> bool:
        return not (value >= bound if self.setting.startswith("min_") else value <= bound)  # NaN is in no bounds


BOUNDS = (
    Bound("max_kl", "train/answer_kl", "raise algorithm.kl.coef, or lower optimizer.lr"),
    Bound("max_clip_fraction", "train/clip_fraction", "lower optimizer.lr, or algorithm.epochs x minibatches"),
    Bound("max_grad_norm", "train/grad_norm", "lower optimizer.lr or optimizer.clip_grad"),
    Bound("min_entropy", "train/entropy", "raise algorithm.entropy_coef or algorithm.clip_high"),
    Bound("max_mismatch_kl", "mismatch/kl", "set algorithm.correction.kind, or model.dtype of more digits"),
    Bound("max_sync_share", "sync share", "raise sync.bucket_mib, set sync.overlap=true, or sync.verify=never"),
    Bound("max_memory_gb", "memory", "set train.recompute=full, or lower train.micro_batch_size"),
    Bound("min_tokens_per_second", "tokens_per_second", "look at time/* for the phase that has grown"),
)


class Guard:
    """Watches a run's gradients, KL and metrics, by the `guard` settings of the step's recipe.

    Every rank calls every method with the same numbers, and so takes the same decision.
    """

    def __init__(self, record: Record):
        self._record = record
        self._norms: dict[str, deque[float]] = {}
        self._outside: set[str] = set()
        self._interventions = 0
        self._engines_compared = False

    @property
    def progress(self) -> dict[str, Any]:
        """What a checkpoint saves, as JSON."""
        return {"norms": {of: list(norms) for of, norms in self._norms.items()}, "interventions": self._interventions}

    def restore(self, progress: Mapping[str, Any]) -> None:
        self._norms = {of: deque(norms, maxlen=REMEMBERED) for of, norms in progress["norms"].items()}
        self._interventions = progress["interventions"]

    def accepts_grad_norm(self, norm: float, recipe: Recipe, of: str = "policy") -> bool:
        """Return whether a gradient of this norm may update the policy, or the critic.

        It must be finite, and no more than `guard.spike` times the median of the last accepted norms. Norms up to
        `clip_grad` are never spikes: after steps with hardly any gradient a usual one would look like a spike.
        """
        norms = self._norms.setdefault(of, deque(maxlen=REMEMBERED))
        limit, spike = math.inf, recipe.guard.spike
        if spike is not None and len(norms) >= USUAL_AFTER:
            critic = recipe.critic.optimizer if of == "critic" else None
            limit = max(spike * statistics.median(norms), (critic or recipe.optimizer).clip_grad)
        good = math.isfinite(norm) and norm <= limit
        if good and norm > 0:
            norms.append(norm)
        return good

    def must_compare_engines(self, recipe: Recipe) -> bool:
        """Return whether `compare_engines` still has to be called: once per process, also after a resume."""
        return not self._engines_compared and recipe.guard.initial_mismatch != "ignore"

    def compare_engines(self, step: int, row: Mapping[str, float], experts: bool, recipe: Recipe) -> None:
        """Check the first mismatch of log-probabilities that this process measures, before the first update.

        Args:
            row: the metrics `mismatch/logprob_abs_mean`, `..._p99` and `..._max`, in nats, the same on every rank.
            experts: whether the model routes tokens to experts.

        Raises:
            EnginesDisagree: it is more than the dtype explains, and `guard.initial_mismatch` is `stop`.
        """
        self._engines_compared = True
        dtype = recipe.model.dtype
        mean, bound = row["mismatch/logprob_abs_mean"], EXPLAINED_MISMATCH[dtype][experts]
        if mean <= bound:  # NaN is not
            return
        stops = recipe.guard.initial_mismatch == "stop"
        p99, largest = row["mismatch/logprob_abs_p99"], row["mismatch/logprob_abs_max"]
        said = (
            f"step {step}: training and vLLM do not compute the same model: their log-probabilities of the sampled "
            f"tokens differ by {mean:.4g} nats in the mean (p99 {p99:.4g}, largest {largest:.4g}), and "
            f"model.dtype={dtype} explains at most {bound:g}{' in a model with experts' if experts else ''}. "
            "Likely causes: a rope setting in the checkpoint's config.json that the two read differently "
            "(rope_parameters, rope_scaling, rope_theta); another temperature; weights that are not the same (set "
            "sync.verify=always); an operation that a dtype of fewer digits breaks (try model.dtype=float32). "
        )
        said += "guard.initial_mismatch=warn goes on all the same" if stops else "The run goes on all the same"
        numbers = {"mean": str(mean), "p99": str(p99), "max": str(largest)}
        told = {"bound": bound, "dtype": dtype, "experts": experts, **numbers}
        self._record.event("engines_disagree", "" if stops else said, step=step, **told)
        if stops:
            raise EngineMismatch(said)

    def record_skip(self, step: int, norm: float, recipe: Recipe, of: str = "policy") -> None:
        """Record that a gradient of the policy or the critic was not accepted: the rest of the step is skipped.

        Raises:
            TooManyInterventions: more than `guard.max_interventions`.
        """
        why = "is not finite" if not math.isfinite(norm) else "is out of all proportion"
        said = f"the {of}'s gradient has norm {norm:g}, which {why}: its batch is skipped"
        self._intervene(step, "batch_skipped", said, recipe, norm=str(norm), of=of)

    def freeze_kl_coef(self, step: int, kl: float, controller: KlController, recipe: Recipe) -> None:
        """Set the coefficient to the recipe's and keep it there, where an adaptive one lets the KL explode.

        Raises:
            TooManyInterventions: more than `guard.max_interventions`.
        """
        limit, coef = recipe.guard.kl_explosion, recipe.algorithm.kl.coef
        if limit is not None and controller.target is not None and not kl <= limit:
            numbers = f"KL of an answer {kl:g} against guard.kl_explosion={limit:g}"
            said = f"{numbers}: its coefficient is {coef:g} from the next step on"
            controller.coef, controller.target = coef, None
            self._intervene(step, "kl_fixed", said, recipe, kl=str(kl))

    def watch(self, row: Mapping[str, float], memory_gb: float, recipe: Recipe) -> None:
        """Report each metric that is outside of its bound and was not at the last step, and what can be done."""
        share = row.get("sync/exposed_seconds", 0.0) / row["time/step"]
        values = {**row, "sync share": share, "memory": memory_gb}
        for bound in BOUNDS:
            limit, value = getattr(recipe.guard, bound.setting), values.get(bound.metric)
            if limit is None or value is None:
                continue
            left = bound.left(value, limit)
            if left and bound.setting not in self._outside:
                step, numbers = row["step"], f"{bound.metric} {value:.4g} against guard.{bound.setting}={limit:g}"
                said = f"step {step:g}: {numbers}: {bound.advice}"
                self._record.event("bound_left", said, step=step, metric=bound.metric, value=str(value), bound=limit)
            (self._outside.add if left else self._outside.discard)(bound.setting)

    def _intervene(self, step: int, event: str, said: str, recipe: Recipe, **fields: Any) -> None:
        self._interventions += 1
        self._record.event(event, f"step {step}: {said}", step=step, interventions=self._interventions, **fields)
        if self._interventions > recipe.guard.max_interventions:
            limit = f"guard.max_interventions={recipe.guard.max_interventions}"
            raise TooManyInterventions(f"step {step}: {said}; more than {limit} interventions")

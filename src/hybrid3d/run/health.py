"""Watches the health of a run: reports metrics that are out of bounds and intervenes when training diverges."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.rl.kl import KlController
from hybrid3d.run.bounds import BOUNDS
from hybrid3d.run.logger import RunLogger

GRAD_NORM_HISTORY = 20  # recent gradient norms whose median a spike is compared with
MIN_GRAD_NORMS = 5  # norms in the history before spikes are detected

# Mean absolute difference in nats between training's and vLLM's log-probabilities of sampled tokens that rounding in a
# dtype explains: (without experts, with experts), because rounding may route a token to other experts. The mean is
# robust against single tokens with a large error. `docs/algorithms.md` has the measurements.
MAX_EXPLAINED_MISMATCH = {"float32": (0.05, 0.05), "bfloat16": (0.15, 0.4), "fp8": (0.6, 1.0)}


class TooManyInterventions(RuntimeError):
    """Raised when a run needs more interventions than `guard.max_interventions`."""

    raised_on_all_ranks = True  # so that only one rank reports it


class EngineMismatch(RuntimeError):
    """Raised when training and vLLM do not compute the same model."""

    raised_on_all_ranks = True  # so that only one rank reports it


class Guard:
    """Watches the gradients, KL and metrics of a run, with the `guard` settings of the step's recipe.

    Every rank must call every method with the same values, so that all ranks take the same decision. A method that
    intervenes raises `TooManyInterventions` when that was more often than `guard.max_interventions`.
    """

    def __init__(self, record: RunLogger):
        self._record = record
        self._norms: dict[str, deque[float]] = {}  # accepted norms by model
        self._violated: set[str] = set()  # settings whose bounds were violated at the last step
        self._interventions = 0
        self._engines_compared = False

    @property
    def progress(self) -> dict[str, Any]:
        """The state that a checkpoint saves, as JSON."""
        norms = {model: list(norms) for model, norms in self._norms.items()}
        return {"norms": norms, "interventions": self._interventions}

    def restore(self, progress: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint's `progress`."""
        self._norms = {model: deque(norms, maxlen=GRAD_NORM_HISTORY) for model, norms in progress["norms"].items()}
        self._interventions = progress["interventions"]

    def accepts_grad_norm(self, norm: float, recipe: Recipe, model: str = "policy") -> bool:
        """Return whether a gradient of this norm may update the model, `policy` or `critic`.

        It must be finite, and no more than `guard.spike` times the median of the last accepted norms. Norms up to
        `clip_grad` are never spikes: after steps with tiny gradients, a normal one would look like a spike.
        """
        norms = self._norms.setdefault(model, deque(maxlen=GRAD_NORM_HISTORY))
        limit, spike = math.inf, recipe.guard.spike
        if spike is not None and len(norms) >= MIN_GRAD_NORMS:
            critic_optimizer = recipe.critic.optimizer if model == "critic" else None
            limit = max(spike * statistics.median(norms), (critic_optimizer or recipe.optimizer).clip_grad)
        accepted = math.isfinite(norm) and norm <= limit
        if accepted and norm > 0:
            norms.append(norm)
        return accepted

    def must_compare_engines(self, recipe: Recipe) -> bool:
        """Return whether `compare_engines` still has to be called: once per process, including after a resume."""
        return not self._engines_compared and recipe.guard.initial_mismatch != "ignore"

    def compare_engines(self, step: int, row: Mapping[str, float], experts: bool, recipe: Recipe) -> None:
        """Check the first mismatch of log-probabilities that this process measures, before the first update.

        Args:
            row: the metrics `mismatch/logprob_abs_mean`, `..._p99` and `..._max`, in nats, the same on every rank.
            experts: whether the model routes tokens to experts.

        Raises:
            EngineMismatch: the mismatch is more than the dtype explains, and `guard.initial_mismatch` is `stop`.
        """
        self._engines_compared = True
        dtype, setting = least_precise(recipe)
        mean, bound = row["mismatch/logprob_abs_mean"], MAX_EXPLAINED_MISMATCH[dtype][experts]
        if mean <= bound:  # false for NaN
            return
        stops = recipe.guard.initial_mismatch == "stop"
        p99, largest = row["mismatch/logprob_abs_p99"], row["mismatch/logprob_abs_max"]
        message = (
            f"step {step}: training and vLLM do not compute the same model: their log-probabilities of the sampled "
            f"tokens differ by {mean:.4g} nats on average (p99 {p99:.4g}, maximum {largest:.4g}), but "
            f"{setting} explains at most {bound:g}{' in a model with experts' if experts else ''}. "
            "Likely causes: a rope setting in the checkpoint's config.json that the two read differently "
            "(rope_parameters, rope_scaling, rope_theta); different temperatures; different weights (set "
            "sync.verify=always); an operation that needs a dtype of higher precision (try model.dtype=float32). "
        )
        message += "Set guard.initial_mismatch=warn to continue anyway" if stops else "The run continues anyway"
        mismatch = {"mean": str(mean), "p99": str(p99), "max": str(largest)}
        fields = {"bound": bound, "dtype": dtype, "experts": experts, **mismatch}
        self._record.event("engines_disagree", "" if stops else message, step=step, **fields)
        if stops:
            raise EngineMismatch(message)

    def record_skip(self, step: int, norm: float, recipe: Recipe, model: str = "policy") -> None:
        """Record that a gradient of the policy or the critic was not accepted: the rest of the step is skipped."""
        reason = "not finite" if not math.isfinite(norm) else "a spike"
        message = f"the {model}'s gradient norm {norm:g} is {reason}: its batch is skipped"
        self._intervene(step, "batch_skipped", message, recipe, norm=str(norm), of=model)

    def freeze_kl_coef(self, step: int, kl: float, controller: KlController, recipe: Recipe) -> None:
        """Reset an adaptive coefficient to the recipe's and fix it, if an answer's KL exceeds `guard.kl_explosion`."""
        limit, coef = recipe.guard.kl_explosion, recipe.algorithm.kl.coef
        if limit is not None and controller.target is not None and not kl <= limit:
            message = (
                f"the KL of an answer is {kl:g}, above guard.kl_explosion={limit:g} or not finite: "
                f"its coefficient is fixed at {coef:g} from the next step on"
            )
            controller.coef, controller.target = coef, None
            self._intervene(step, "kl_fixed", message, recipe, kl=str(kl))

    def check_bounds(self, row: Mapping[str, float], memory_gb: float, recipe: Recipe) -> None:
        """Report each metric of the step that violates its bound and did not at the last step, with advice.

        `memory_gb` is the most memory that a rank used in a phase of the step, in 10^9 bytes.
        """
        share = row.get("sync/exposed_seconds", 0.0) / row["time/step"]
        values = {**row, "sync share": share, "memory": memory_gb}
        for bound in BOUNDS:
            limit, value = getattr(recipe.guard, bound.setting), values.get(bound.metric)
            if limit is None or value is None:
                continue
            violated = not (value >= limit if bound.setting.startswith("min_") else value <= limit)  # true for NaN
            if violated and bound.setting not in self._violated:
                step = row["step"]
                numbers = f"{bound.metric} {value:.4g} violates guard.{bound.setting}={limit:g}"
                message = f"step {step:g}: {numbers}: {bound.advice}"
                self._record.event("bound_left", message, step=step, metric=bound.metric, value=str(value), bound=limit)
            (self._violated.add if violated else self._violated.discard)(bound.setting)

    def _intervene(self, step: int, event: str, message: str, recipe: Recipe, **fields: Any) -> None:
        self._interventions += 1
        self._record.event(event, f"step {step}: {message}", step=step, interventions=self._interventions, **fields)
        if self._interventions > recipe.guard.max_interventions:
            limit = recipe.guard.max_interventions
            raise TooManyInterventions(f"step {step}: {message}; guard.max_interventions={limit} is exceeded")


def least_precise(recipe: Recipe) -> tuple[str, str]:
    """Return the least precise dtype that an engine computes in, and the setting that says so."""
    if recipe.rollout is not None and recipe.rollout.quantization is not None:
        return "fp8", f"rollout.quantization={recipe.rollout.quantization}"
    if recipe.train.fp8 != "none":
        return "fp8", f"train.fp8={recipe.train.fp8}"
    return recipe.model.dtype, f"model.dtype={recipe.model.dtype}"

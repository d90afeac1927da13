"""Recipe section about the algorithm: its name, what it combines, its KL, its correction and its batch sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from hybrid3d.config import algorithms, schema
from hybrid3d.config.refusals import ONLY_IF, of_loss, of_own, of_pairs, of_recipe, of_sampling, only_if

Url = Annotated[
    str, schema.Rule(lambda s: re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", s) is not None, "http://HOST:PORT/v1")
]
K3_CLAMP = 10.0
MEASURED = of_own(lambda kl: kl.where != "none", "algorithm.kl.where=none measures no KL")
HAS_GRADIENT = of_own(lambda kl: kl.where != "reward", "with algorithm.kl.where=reward the KL has no gradient")
HAS_TARGET = of_own(
    lambda kl: kl.target is not None,
    "without algorithm.kl.target the coefficient is fixed",
    "algorithm.kl.target",
)
HAS_REFERENCE = (
    of_recipe(
        lambda recipe: recipe.algorithm.uses_reference or not recipe.algorithm.uses_pairs,
        "algorithm.preference.loss_type={recipe.algorithm.preference.loss_type} has no reference",
    ),
    of_recipe(lambda recipe: recipe.algorithm.uses_reference, "algorithm.kl.where=none measures no KL"),
)
KL_IS_SAMPLED = of_sampling("measures no KL")
Smoothing = Annotated[float, schema.Rule(lambda x: 0 <= x < 0.5, "at least 0 and less than 0.5")]


@dataclass(frozen=True, kw_only=True)
class Kl:
    """KL divergence of the policy from the reference, which is a frozen copy of the initial policy or of `reference`.

    Attributes:
        where: Subtract the KL from the reward, add it to the loss, or do not measure it.
        reference: Checkpoint of the reference, such as a teacher (`docs/algorithms.md`); `null`: the policy's.
        endpoint: Address of a server that computes the reference instead, such as `http://teacher:8000/v1` of
            `hybrid3d serve` or vLLM (`docs/algorithms.md`).
        estimator: KL estimator; `null`: `k1` in the reward and `k3` in the loss. In the loss, one with `+` has the
            gradient of `k2`, which is that of the KL.
        clamp: Bound on the absolute value of a token's estimate, beyond which it has no gradient; `null`: 10 for `k3`,
            as in verl, and none for the others.
        ratio_weighted: In the loss, multiply `k1` or `k3` by the token's probability ratio, which makes its gradient
            unbiased, also when several updates use the same samples (DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
        coef: Coefficient of the KL. Required unless `where` is `none`.
        target: Target KL of an answer, in nats summed over its tokens, for an adaptive coefficient (arXiv 1909.08593,
            section 2.2); `null`: the coefficient is fixed.
        horizon: Number of answers over which an adaptive coefficient adjusts: a step changes it by a factor of at
            most 1 ± 0.2 x answers / `horizon`.
    """

    where: Literal["reward", "loss", "none"] = field(metadata={ONLY_IF: (KL_IS_SAMPLED,)})
    reference: schema.FilePath | None = only_if(None, *HAS_REFERENCE)
    endpoint: Url | None = only_if(None, *HAS_REFERENCE)
    estimator: Literal["k1", "k1+", "k2", "k3", "k3+", "abs", "abs+"] | None = only_if(None, MEASURED)
    clamp: schema.Positive | None = only_if(None, MEASURED)
    ratio_weighted: bool = only_if(False, MEASURED, HAS_GRADIENT)
    coef: schema.Coefficient = field(default=0.0, metadata={schema.REQUIRED_UNLESS: ("where", "none")})
    target: schema.Positive | None = only_if(None, MEASURED)
    horizon: schema.Steps = only_if(10_000, MEASURED, HAS_TARGET)

    @property
    def effective_estimator(self) -> str:
        """Return the estimator in use: `estimator`, or the default of `where`."""
        return self.estimator or ("k1" if self.where == "reward" else "k3")

    @property
    def effective_clamp(self) -> float | None:
        """Return the bound in use: `clamp`, or the default of the estimator, of which only `k3` grows exponentially."""
        return K3_CLAMP if self.clamp is None and self.effective_estimator == "k3" else self.clamp


CORRECTS = of_own(
    lambda correction: correction.kind != "none",
    "algorithm.correction.kind=none corrects nothing",
    "algorithm.correction.kind",
)
BOUNDS_FROM_BELOW = of_own(
    lambda correction: correction.kind not in ("truncate", "sequence_truncate"),
    "algorithm.correction.kind={own.kind} bounds ratios only from above, by high",
    "algorithm.correction.kind",
)
HAS_ROLLOUT = of_sampling("has no rollout to correct for")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Correction of the mismatch between training and rollout probabilities of sampled tokens.

    Attributes:
        kind: Weight the loss by the probability ratio train / rollout, capped at `high` (`truncate`) or set to 0
            outside of `low` to `high` (`mask`); `sequence_*` uses the ratio of the whole answer instead of each
            token's, and `sequence_mean_mask` the geometric mean of its tokens' ratios (of agents' answers, of each
            branch).
        low: Lower bound of the ratio (`mask` only).
        high: Upper bound of the ratio (`truncate` and `mask`).
        normalize: Divide the weights by their mean over the step's tokens that are trained.
        bypass: Use vLLM's log-probabilities as those of the policy before the update, so that the ratio of the policy
            loss, and its clip, are relative to the policy that sampled.
    """

    kind: Literal["none", "truncate", "mask", "sequence_truncate", "sequence_mask", "sequence_mean_mask"] = only_if(
        "none", HAS_ROLLOUT
    )
    low: schema.NonNegative = only_if(0.5, CORRECTS, BOUNDS_FROM_BELOW)
    high: schema.Positive = only_if(2.0, CORRECTS)
    normalize: bool = only_if(False, CORRECTS)
    bypass: bool = only_if(False, HAS_ROLLOUT)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Constants of the policy losses that have some of their own.

    Attributes:
        tau_positive: Temperature of `sapo`'s gate for positive advantages.
        tau_negative: Temperature of `sapo`'s gate for other advantages.
        cov_fraction: Fraction of a step's tokens that `clip_cov` excludes or that `kl_cov` penalizes.
        cov_low: Lowest covariance of log-probability and advantage of the tokens that `clip_cov` selects from.
        cov_high: Highest covariance of the tokens that `clip_cov` selects from.
        cov_kl_coef: Coefficient of `kl_cov`'s penalty.
        max_ratio: Upper bound of the ratio with which `dppo_tv` and `dppo_kl` weight a token.
    """

    tau_positive: schema.Positive = only_if(1.0, of_loss("sapo"))
    tau_negative: schema.Positive = only_if(1.05, of_loss("sapo"))
    cov_fraction: schema.OpenFraction = only_if(2e-4, of_loss("clip_cov", "kl_cov"))
    cov_low: schema.NonNegative = only_if(1.0, of_loss("clip_cov"))
    cov_high: schema.Positive = only_if(5.0, of_loss("clip_cov"))
    cov_kl_coef: schema.Coefficient = only_if(1.0, of_loss("kl_cov"))
    max_ratio: schema.AboveOne = only_if(20.0, of_loss("dppo_tv", "dppo_kl"))


ON_PAIRS = of_pairs("trains on no preference pairs")
BY_LOSS = "algorithm.preference.loss_type={own.loss_type} does not use it"
SMOOTHED = of_own(lambda preference: preference.loss_type in algorithms.SMOOTHED_LOSSES, BY_LOSS)
SIMPO = of_own(lambda preference: preference.loss_type == "simpo", BY_LOSS)


@dataclass(frozen=True, kw_only=True)
class Preference:
    """Loss of a preference pair, with the names of TRL; `dpo` only (`docs/algorithms.md`).

    Attributes:
        loss_type: `sigmoid` is DPO, `sigmoid_norm` its length-normalized variant; the others are robust DPO, the hinge
            loss, IPO, APO and SimPO, which has no reference.
        beta: Coefficient of log-ratios to the reference, which are rewards; of `ipo` the paper's tau. SimPO needs more,
            such as 2.
        label_smoothing: Fraction of pairs whose answers are assumed to be swapped (`sigmoid`, `sigmoid_norm`, `robust`
            and `simpo`).
        simpo_gamma: Target margin of the rewards of `simpo`.
        sft_coef: Coefficient of the negative log-likelihood of chosen answers, a mean over their tokens, which is added
            to the loss.
    """

    loss_type: algorithms.PreferenceLossType = only_if("sigmoid", ON_PAIRS)
    beta: schema.Positive = only_if(0.1, ON_PAIRS)
    label_smoothing: Smoothing = only_if(0.0, ON_PAIRS, SMOOTHED)
    simpo_gamma: schema.NonNegative = only_if(0.5, ON_PAIRS, SIMPO)
    sft_coef: schema.Coefficient = only_if(0.0, ON_PAIRS)


SAMPLES = of_sampling("trains on the answers of the data")
DISCOUNTS = of_recipe(
    lambda recipe: recipe.algorithm.combination.advantage in algorithms.TOKEN_ADVANTAGES,
    "algorithm.name={recipe.algorithm.name} does not discount, only algorithm.advantage=returns and gae do",
)
ESTIMATES = of_recipe(
    lambda recipe: recipe.algorithm.uses_critic,
    "algorithm.name={recipe.algorithm.name} estimates no values, only algorithm.advantage=gae does",
)
CLIPS = of_loss("ppo", "cispo", "gmpo", "clip_cov", "dppo_tv", "dppo_kl")
DUAL_CLIPS = of_loss("ppo", "clip_cov")


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The RL algorithm and its batch sizes. `null`: the algorithm's default (`docs/algorithms.md`).

    Attributes:
        name: The algorithm: the defaults of the settings that are `null`.
        prompts_per_step: Prompts per step; with `sft`, sequences per step, and with `dpo` pairs of them.
        samples_per_prompt: Answers sampled per prompt.
        epochs: Passes over a step's samples.
        minibatches: Optimizer updates per epoch.
        advantage: The advantage of an answer is its reward minus the mean of its prompt's answers (`group_mean`), of
            its prompt's other answers (`leave_one_out`), their mean weighted by length (`length_weighted_mean`), or the
            reward of a greedy answer (`greedy_answer`); with `best_of_group` only the best answer has one, its lead
            over the second. With `returns` a token's advantage is its reward-to-go, with `gae` that of a critic.
        advantage_scale: Divide advantages by the standard deviation of the rewards of a prompt's answers (`group_std`)
            or of all answers of the step (`batch_std`), or by the fraction of groups whose rewards vary
            (`varying_groups`); `whiten` normalizes them over all trained tokens of the step.
        policy_loss: The loss of a token, given its advantage and the probability ratio.
        ratio: Probability ratio of each token; or one per answer (of agents' answers: per branch), its tokens'
            geometric mean (`sequence`), also with the gradient of each token's own (`sequence_straight_through`).
        clip: Clip range of the probability ratio below 1, and above 1 too unless `clip_high` is given. With `gmpo` it
            is that of the logarithm of the ratio, and with `dppo_*` a bound on the divergence.
        clip_high: Clip range of the probability ratio above 1.
        dual_clip: Upper bound of the probability ratio for negative advantages (arXiv 1912.09729, c); `null`: none.
        loss_agg_mode: Aggregate token losses as a mean over all tokens (`token`), a mean over answers of their means
            (`sequence`) or of their sums (`sequence_sum`), or a sum divided by the answers times the maximum answer
            length (`constant`).
        entropy_coef: Coefficient of the entropy bonus.
        mask_truncated: Do not train on answers that were cut, as no token was left for them or for the reply of their
            environment (arXiv 2503.14476, section 3.4); of agents' answers, on branches that were.
        high_entropy_fraction: Fraction of a step's tokens that are trained, those with the highest entropy, that the
            policy loss is computed on (arXiv 2506.01939); `null`: all.
        gamma: Discount factor per token (`returns` and `gae`).
        lam: Lambda of GAE.
        dynamic_sampling: Maximum number of extra prompt batches that a step generates to replace groups whose rewards
            are all equal.
        loss, preference, kl, correction: Sections of their own, below.
    """

    name: algorithms.Name
    prompts_per_step: schema.Sequences
    samples_per_prompt: schema.Sequences = only_if(1, SAMPLES)
    epochs: schema.Repeats = only_if(1, SAMPLES)
    minibatches: schema.Repeats = only_if(1, SAMPLES)
    advantage: algorithms.Advantage | None = only_if(None, SAMPLES)
    advantage_scale: algorithms.AdvantageScale | None = only_if(None, SAMPLES)
    policy_loss: algorithms.LossKind | None = only_if(None, SAMPLES)
    ratio: algorithms.Ratio | None = only_if(None, SAMPLES)
    clip: schema.OpenFraction | None = only_if(None, SAMPLES, CLIPS)
    clip_high: schema.Positive | None = only_if(None, SAMPLES, CLIPS)
    dual_clip: schema.AboveOne | None = only_if(None, SAMPLES, DUAL_CLIPS)
    loss_agg_mode: algorithms.Aggregation | None = only_if(None, SAMPLES)
    entropy_coef: schema.Coefficient = only_if(0.0, SAMPLES)
    mask_truncated: bool = only_if(False, SAMPLES)
    high_entropy_fraction: schema.OpenFraction | None = only_if(None, SAMPLES)
    gamma: schema.ClosedFraction = only_if(1.0, SAMPLES, DISCOUNTS)
    lam: schema.ClosedFraction = only_if(1.0, SAMPLES, ESTIMATES)
    dynamic_sampling: schema.RepeatsOrZero | None = only_if(None, SAMPLES)
    loss: PolicyLoss = PolicyLoss()
    preference: Preference = Preference()
    kl: Kl = Kl(where="none", coef=0.0)
    correction: Correction = Correction()

    @property
    def combination(self) -> algorithms.Combination:
        """Return what the algorithm combines: this section's settings, and the name's where they are `null`."""
        defaults = algorithms.ALGORITHMS.get(self.name, algorithms.Combination())
        if self.clip is not None and self.clip_high is None:
            defaults = replace(defaults, clip_high=None)  # the bound on both sides
        given = {key.name: getattr(self, key.name) for key in fields(defaults)}
        return replace(defaults, **{key: value for key, value in given.items() if value is not None})

    @property
    def generates(self) -> bool:
        """Return whether training samples answers with vLLM; `sft` and `dpo` do not."""
        return self.name not in algorithms.FROM_DATA

    @property
    def uses_pairs(self) -> bool:
        """Return whether the data are preference pairs."""
        return self.name == "dpo"

    @property
    def uses_reference(self) -> bool:
        """Return whether there is a frozen reference policy beside the one that is trained."""
        if self.uses_pairs:
            return self.preference.loss_type not in algorithms.REFERENCE_FREE_LOSSES
        return self.kl.where != "none"

    @property
    def answers_per_prompt(self) -> int:
        """Return the number of sequences that a step trains on for each of its prompts."""
        return self.samples_per_prompt if self.generates else 2 if self.uses_pairs else 1

    @property
    def uses_critic(self) -> bool:
        """Return whether the algorithm trains a value model."""
        return self.generates and self.combination.advantage == "gae"

    @property
    def uses_groups(self) -> bool:
        """Return whether advantages compare the answers to one prompt."""
        advantage, scale = self.combination.advantage, self.combination.advantage_scale
        compares = advantage in algorithms.GROUP_ADVANTAGES or scale in algorithms.GROUP_SCALES
        return self.generates and compares

    @property
    def uses_greedy_answers(self) -> bool:
        """Return whether each prompt has a greedy answer too, whose reward is the others' baseline."""
        return self.generates and self.combination.advantage == "greedy_answer"

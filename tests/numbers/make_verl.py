"""Write verl.json: what verl computes for small batches, against which the tests of hybrid3d's formulas check theirs.

    pip install torch numpy ray "transformers<5" tensordict omegaconf hydra-core codetiming
    git clone https://github.com/verl-project/verl && git -C verl checkout b178a3cd
    PYTHONPATH=verl python tests/numbers/make_verl.py

It calls verl's own functions of `trainer/ppo/core_algos.py` and `trainer/ppo/rollout_corr_helper.py`, in float64, on
the batches of `trl.json`. Run it once for each commit that README.md beside this file names: a case of which two
versions give the same numbers stands once in the file, and otherwise once for each.
"""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
from omegaconf import OmegaConf
from packaging.version import Version
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo import rollout_corr_helper as correction
from verl.workers.config import ActorConfig

from batches import BATCHES, LENGTHS, lists, write

Case = dict[str, Any]

GROUP = 4
# dppo_tv, dppo_kl, token-sum, IcePop's two bounds and kl_penalty's "+" came after 0.8 (whose "+" raises an error)
NEWER = Version(verl.__version__).release >= (0, 10)
COVARIANCES = {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.3, "clip_cov_ub": 5.0}  # with ratio 1 nothing is drawn by chance
TOKEN_WEIGHTS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
REJECTION = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.8_1.3"}


def clips(low: float, high: float, dual: float | None = None) -> dict[str, float]:
    """Settings of a clip in verl's names."""
    return {"clip_ratio_low": low, "clip_ratio_high": high, **({} if dual is None else {"clip_ratio_c": dual})}


EVERY = tuple(BATCHES)
TWO = ("ragged", "holes")
MASKED = ("ragged", "holes", "empty_sequence")
# Name, batches, and settings: ActorConfig's, or, if it has no such field, those of its `policy_loss`.
LOSSES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("vanilla", EVERY, {"loss_mode": "vanilla", **clips(0.2, 0.2, 3.0)}),
    ("vanilla_clip_higher", TWO, {"loss_mode": "vanilla", **clips(0.2, 0.28, 3.0)}),
    ("vanilla_low_dual_clip", TWO, {"loss_mode": "vanilla", **clips(0.2, 0.28, 1.3)}),
    ("gspo", EVERY, {"loss_mode": "gspo", **clips(0.1, 0.15)}),
    ("sapo", EVERY, {"loss_mode": "sapo", "tau_pos": 1.0, "tau_neg": 1.05}),
    ("gpg", EVERY, {"loss_mode": "gpg"}),
    ("clip_cov", EVERY, {"loss_mode": "clip_cov", **clips(0.2, 0.2), **COVARIANCES}),
    ("clip_cov_none", TWO, {"loss_mode": "clip_cov", **clips(0.2, 0.2), **COVARIANCES, "clip_cov_lb": 4.0}),
    ("kl_cov", EVERY, {"loss_mode": "kl_cov", "kl_cov_ratio": 0.2, "ppo_kl_coef": 1.0}),
    ("geo_mean", EVERY, {"loss_mode": "geo_mean", **clips(0.4, 0.4)}),
    ("geo_mean_narrow", TWO, {"loss_mode": "geo_mean", **clips(0.2, 0.28)}),
    ("cispo", EVERY, {"loss_mode": "cispo", **clips(0.2, 0.28)}),
    ("cispo_no_lower", TWO, {"loss_mode": "cispo", **clips(1.0, 0.28)}),
    ("cispo_wide", TWO, {"loss_mode": "cispo", **clips(1.0, 4.0)}),
    ("bypass_ppo_clip", MASKED, {**clips(0.2, 0.28, 3.0), "rollout_correction": {"loss_type": "ppo_clip"}}),
    (
        "bypass_ppo_clip_rejection",
        TWO,
        {**clips(0.2, 0.28, 3.0), "rollout_correction": {"loss_type": "ppo_clip", **REJECTION}},
    ),
    ("bypass_reinforce", MASKED, {"rollout_correction": {"loss_type": "reinforce", **TOKEN_WEIGHTS}}),
    (
        "bypass_reinforce_rejection",
        TWO,
        {"rollout_correction": {"loss_type": "reinforce", **TOKEN_WEIGHTS, **REJECTION}},
    ),
]
if NEWER:
    LOSSES += [
        ("dppo_tv", EVERY, {"loss_mode": "dppo_tv", **clips(0.15, 0.15, 20.0)}),
        ("dppo_tv_truncated", TWO, {"loss_mode": "dppo_tv", **clips(0.1, 0.2, 1.2)}),
        ("dppo_kl", EVERY, {"loss_mode": "dppo_kl", **clips(0.1, 0.1, 20.0)}),
        ("dppo_kl_truncated", TWO, {"loss_mode": "dppo_kl", **clips(0.01, 0.3, 1.2)}),
    ]

# These two take it whatever is set; GMPO has a mean over sequences of its own, empty ones included.
FIXED_AGGREGATION = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "geo_mean": "seq-mean"}


def loss_case(name: str, batch_name: str, settings: dict[str, Any], info: dict[str, Any] | None = None) -> Case:
    """verl's policy loss of a batch, and its gradient in logprobs."""
    settings = {"loss_mode": "bypass_mode", "loss_agg_mode": "token-mean", **settings}
    mode = settings["loss_mode"]
    fields = {field: value for field, value in settings.items() if field in ActorConfig.__dataclass_fields__}
    policy = {field: value for field, value in settings.items() if field not in fields}
    config = ActorConfig(
        strategy="megatron",
        rollout_n=GROUP,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=OmegaConf.create(policy),
        global_batch_info=info or {},
        **fields,
    )
    batch = BATCHES[batch_name]
    old = "rollout_logprobs" if mode == "bypass_mode" else "old_logprobs"
    logprobs = batch["logprobs"].clone().requires_grad_()
    function = core_algos.get_policy_loss_fn(mode)
    loss, metrics = function(
        old_log_prob=batch[old],
        log_prob=logprobs,
        advantages=batch["advantages"][:, None] * batch["mask"],
        response_mask=batch["mask"],
        loss_agg_mode=settings["loss_agg_mode"],
        config=config,
    )
    (gradient,) = torch.autograd.grad(loss, logprobs)
    shown = {**settings, "loss_agg_mode": FIXED_AGGREGATION.get(mode, settings["loss_agg_mode"])}
    metrics = {key: value for key, value in metrics.items() if key.startswith("actor/")}
    return {
        "name": f"{name}_{batch_name}",
        "made_by": f"core_algos.{function.__name__}",
        "batch": batch_name,
        "settings": {**shown, **(info or {}), "old_log_prob": old},
        "outputs": {"loss": loss.detach(), "gradient": gradient, "metrics": metrics},
    }


def loss_cases() -> list[Case]:
    return [loss_case(name, batch, settings) for name, batches, settings in LOSSES for batch in batches]


def aggregation_cases() -> list[Case]:
    """The clipped loss in every `loss_agg_mode`, and with what a step of several micro batches divides by."""
    modes: list[tuple[str, str, dict[str, Any]]] = [
        *((mode, mode, {}) for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")),
        ("seq-mean-token-sum-norm", "seq-mean-token-sum-norm", {}),
        ("seq-mean-token-sum-norm_16", "seq-mean-token-sum-norm", {"loss_scale_factor": 16}),
        ("token-mean_of_100", "token-mean", {"batch_num_tokens": 100}),
        ("seq-mean-token-mean_of_32", "seq-mean-token-mean", {"global_batch_size": 32}),
        *([("token-sum", "token-sum", {})] if NEWER else []),
    ]
    cases = []
    for (name, mode, info), batch in product(modes, MASKED):
        settings = {"loss_mode": "vanilla", "loss_agg_mode": mode, **clips(0.2, 0.28, 3.0)}
        case = loss_case(name, batch, settings, info)
        del case["outputs"]["metrics"]  # all the same
        cases.append(case)
    return cases


def kl_cases() -> list[Case]:
    """The KL to the reference, and the gradient of its mean over the tokens in the mask."""
    cases = []
    straight_through = ("k1+", "k3+") if NEWER else ()
    for kind, batch_name in product(("k1", "k2", "k3", "abs", *straight_through), TWO):
        batch = BATCHES[batch_name]
        logprobs = batch["logprobs"].clone().requires_grad_()
        kl = core_algos.kl_penalty(logprobs, batch["ref_logprobs"], kind)
        mean = core_algos.agg_loss(kl, batch["mask"], "token-mean")
        (gradient,) = torch.autograd.grad(mean, logprobs)
        cases.append(
            {
                "name": f"{kind}_{batch_name}",
                "made_by": "core_algos.kl_penalty, then core_algos.agg_loss",
                "batch": batch_name,
                "settings": {"kl_penalty": kind, "loss_agg_mode": "token-mean"},
                "outputs": {"mean": mean.detach(), "gradient": gradient},
            }
        )
    return cases


ONE = [1.0, 0.0, 0.5, 0.25, -2.0, 3.0, 0.125, 0.0, 0.5, 0.5, 0.5, 0.5]  # as in trl.json: the last group's are equal
ALL_VARY = [1.0, 2.0, 0.5, 0.25, -2.0, 3.0, 0.125, 1.5, 0.0, 0.0, 0.0, 0.0]  # no zero where rewards differ
TIES = [1.0, 1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0]
BASELINES = [0.5, 0.0, 0.25, -1.0, 0.75, 1.0, 0.0, -0.5]
TWELVE = [*LENGTHS, 4, 2, 5, 3]  # tokens of each sequence where there is no batch of twelve


def advantage_case(
    name: str, estimator: str, rewards: list[float], batch: str | None = None, **settings: float | bool
) -> Case:
    """verl's advantages of rewards that stand at the last token in the mask."""
    if batch is None:
        mask = (torch.arange(max(TWELVE)) < torch.tensor(TWELVE)[:, None]).double()
    else:
        mask = BATCHES[batch]["mask"]
    size, width = mask.shape
    inputs: dict[str, Any] = {"rewards": rewards[:size], **({"lengths": TWELVE} if batch is None else {})}
    last = (mask * torch.arange(width)).argmax(1)
    token_rewards = torch.zeros_like(mask)
    token_rewards[torch.arange(size), last] = torch.tensor(inputs["rewards"])
    known = {key: value for key, value in settings.items() if key in AlgoConfig.__dataclass_fields__}
    arguments: dict[str, Any] = {"config": AlgoConfig(**known)}
    if estimator != "reinforce_plus_plus" and estimator != "remax":
        arguments["index"] = np.arange(size) // GROUP
        settings = {"group": GROUP, **settings}
    if estimator == "grpo":
        arguments |= known
    if estimator == "remax":
        inputs["baselines"] = BASELINES
        arguments["reward_baselines"] = torch.tensor(BASELINES)
    function = core_algos.get_adv_estimator_fn(estimator)
    advantages, returns = function(token_level_rewards=token_rewards, response_mask=mask, **arguments)
    outputs: dict[str, Tensor] = {"advantages": advantages}
    if estimator in ("reinforce_plus_plus", "remax"):
        outputs["returns"] = returns
    elif estimator != "reinforce_plus_plus_baseline":
        whole = advantages[torch.arange(size), last]
        assert torch.equal(whole[:, None] * mask, advantages), "one advantage an answer"
        outputs["advantages"] = whole
    return {
        "name": f"{name}_{batch or 'twelve'}",
        "made_by": f"core_algos.{function.__name__}",
        **({} if batch is None else {"batch": batch}),
        "settings": {"adv_estimator": estimator, **settings},
        "inputs": inputs,
        "outputs": outputs,
    }


def advantage_cases() -> list[Case]:
    eps = {"epsilon": 1e-6}  # verl's default, which nothing here sets
    with_std, without = {"norm_adv_by_std_in_grpo": True, **eps}, {"norm_adv_by_std_in_grpo": False}
    cases = [
        advantage_case("grpo", "grpo", ONE, **with_std),
        advantage_case("grpo_no_std", "grpo", ONE, **without),
        advantage_case("grpo_passk", "grpo_passk", ONE, **with_std),
        advantage_case("grpo_passk_no_std", "grpo_passk", ONE, **without),
        advantage_case("grpo_passk_ties", "grpo_passk", TIES, **with_std),
        advantage_case("rloo", "rloo", ONE),
        advantage_case("gpg", "gpg", ONE, f_norm=1.0),
        advantage_case("gpg_as_in_the_paper", "gpg", ALL_VARY, f_norm=1.0),
        advantage_case("opo", "opo", ONE),
    ]
    for batch in TWO:
        cases += [
            advantage_case("opo", "opo", ONE, batch),
            advantage_case("remax", "remax", ONE, batch),
            advantage_case("reinforce_plus_plus", "reinforce_plus_plus", ONE, batch, gamma=1.0),
            advantage_case("reinforce_plus_plus_discounted", "reinforce_plus_plus", ONE, batch, gamma=0.9),
            advantage_case("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", ONE, batch),
        ]
    return cases


def correction_case(
    name: str, batch_name: str, function: Callable[..., Any], settings: dict[str, Any]
) -> tuple[Case, Tensor, dict[str, float]]:
    """A case without outputs, then the tensor and the metrics that `function` makes of log(old / rollout)."""
    batch = BATCHES[batch_name]
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    made, metrics = function(log_ratio=log_ratio, response_mask=batch["mask"], **settings)
    case = {
        "name": f"{name}_{batch_name}",
        "made_by": f"rollout_corr_helper.{function.__name__}",
        "batch": batch_name,
        "settings": settings,
    }
    return case, made, metrics


def weight_cases() -> tuple[list[Case], list[Case]]:
    """Weights of a rollout, and, apart since they differ more between versions, their metrics."""
    bounds: tuple[float | str, ...] = (2.0, 1.25, *(("0.5_2.0", "0.8_1.25") if NEWER else ()))
    weights, metrics = [], []
    for level, bound, normalise, batch in product(("token", "sequence"), bounds, (False, True), MASKED):
        settings = {"rollout_is": level, "rollout_is_threshold": bound, "rollout_is_batch_normalize": normalise}
        name = f"{level}_{bound}{'_normalised' if normalise else ''}"
        case, made, measured = correction_case(name, batch, correction.compute_rollout_correction_weights, settings)
        if bound == 2.0 or not (normalise or batch == "empty_sequence"):
            weights.append({**case, "outputs": {"weights": made}})
        if not normalise and batch != "empty_sequence":
            metrics.append({**case, "outputs": {"metrics": measured}})
    return weights, metrics


RULES = [
    ("token_k1", "0.7_1.4"),
    ("token_k2", "0.05"),
    ("token_k3", "0.05"),
    ("seq_sum_k1", "0.6_1.6"),
    ("seq_sum_k2", "0.2"),
    ("seq_sum_k3", "0.2"),
    ("seq_mean_k1", "0.9_1.1"),
    ("seq_mean_k2", "0.05"),
    ("seq_mean_k3", "0.05"),
    ("seq_max_k2", "0.1"),
    ("seq_max_k3", "0.1"),
    ("token_k1,seq_max_k3", "0.7_1.4,0.1"),
]


def rejection_cases() -> list[Case]:
    cases = []
    for (rule, threshold), batch in product(RULES, MASKED):
        settings = {"rollout_rs": rule, "rollout_rs_threshold": threshold}
        case, mask, metrics = correction_case(rule, batch, correction.compute_rollout_rejection_mask, settings)
        fractions = {key: metrics[f"rollout_rs_{key}"] for key in ("masked_fraction", "seq_masked_fraction")}
        cases.append({**case, "outputs": {"mask": mask, **fractions}})
    return cases


def off_policy_cases() -> list[Case]:
    """Metrics of the trained policy (`old_logprobs`) against the rollout's."""
    cases = []
    for name in MASKED:
        batch = BATCHES[name]
        metrics = correction.compute_offpolicy_metrics(batch["old_logprobs"], batch["rollout_logprobs"], batch["mask"])
        cases.append(
            {
                "name": name,
                "made_by": "rollout_corr_helper.compute_offpolicy_metrics",
                "batch": name,
                "settings": {},
                "outputs": {"metrics": metrics},
            }
        )
    return cases


def equal(one: Any, other: Any) -> bool:
    """Whether two values of a case are the same; floats, but for the last digits."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-13 * max(1.0, abs(one))
    return bool(one == other)


def merged(before: list[Case], made: list[Case], version: str) -> list[Case]:
    """The cases of the file and those of this version, in the order of these; equal ones stand once."""
    others = []
    for case in before:
        versions = [name for name in case["verl"] if name != version]
        if versions:
            others.append({**case, "name": case["name"].partition("@")[0], "verl": versions})
    merge: list[Case] = []
    for case in made:
        same_name = [other for other in others if other["name"] == case["name"]]
        others = [other for other in others if other["name"] != case["name"]]
        twins = [other for other in same_name if equal({**other, "verl": 0}, {**case, "verl": 0})]
        both = [version] if not twins else sorted({version, *twins[0]["verl"]}, key=Version)
        distinct = [{**case, "verl": both}, *(other for other in same_name if other not in twins)]
        merge += sorted(distinct, key=lambda case: Version(case["verl"][0]))
    merge += others
    count = Counter(case["name"] for case in merge)
    return [
        {**case, "name": f"{case['name']}@{case['verl'][0]}"} if count[case["name"]] > 1 else case for case in merge
    ]


def main() -> None:
    torch.set_default_dtype(torch.float64)  # verl makes some tensors from numbers
    folder = Path(verl.__file__).parent
    commit = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    weights, weight_metrics = weight_cases()
    sections = {
        "losses": loss_cases(),
        "loss_agg_modes": aggregation_cases(),
        "kl_penalty": kl_cases(),
        "advantages": advantage_cases(),
        "rollout_weights": weights,
        "rollout_weight_metrics": weight_metrics,
        "rejection_masks": rejection_cases(),
        "off_policy_metrics": off_policy_cases(),
    }
    path = Path(__file__).with_name("verl.json")
    before = json.loads(path.read_text()) if path.exists() else {}
    commits = {**before.get("verl", {}), verl.__version__: commit.stdout.strip()}
    numbers = {
        "verl": dict(sorted(commits.items(), key=lambda item: Version(item[0]))),
        "torch": torch.__version__,
        "dtype": "float64",
        **{name: merged(before.get(name, []), lists(cases), verl.__version__) for name, cases in sections.items()},
    }
    write("verl.json", numbers)


if __name__ == "__main__":
    main()

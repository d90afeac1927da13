"""Write trl.json: what TRL computes for small batches, against which the tests of hybrid3d's formulas check theirs.

    pip install trl accelerate datasets
    python tests/numbers/make_trl.py

It runs TRL's own methods on TRL's own trainers of a one-layer random model. Two of a trainer's methods are replaced,
those that run the model: `_generate` gives completions of the wanted lengths, and
`_get_per_token_logps_and_entropies` gives the batch's tensors, in float64. README.md beside this file says what each
case holds.
"""

from __future__ import annotations

import tempfile
from functools import cache, partial
from itertools import product
from typing import Any

import pyarrow
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from batches import BATCHES, LENGTHS, WIDTH, lists, write

GROUP = 4
LIMIT = 16  # max_completion_length, which dr_grpo divides by

NORMALISERS = {
    "grpo": "mean over the B sequences of each sequence's mean over its tokens in the mask (an empty sequence gives 0)",
    "sapo": "mean over the B sequences of each sequence's mean over its tokens in the mask (an empty sequence gives 0)",
    "bnpo": "sum over the tokens in the mask / number of tokens in the mask of this micro batch",
    "dr_grpo": "sum over the tokens in the mask / (B * max_completion_length)",
    "dapo": "sum over the tokens in the mask / number of tokens in the mask of the global batch",
    "cispo": "sum over the tokens in the mask / number of tokens in the mask of the global batch",
    "vespo": "sum over the tokens in the mask / number of tokens in the mask of the global batch",
    "luspo": "mean over the B sequences of each sequence's sum over its tokens in the mask",
}


@cache
def tiny_model(folder: str) -> tuple[str, PreTrainedTokenizerFast]:
    """A random model in `folder`, and a tokenizer of one word."""
    config = Qwen2Config(
        vocab_size=4,
        hidden_size=4,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"[PAD]": 0, "[EOS]": 1, "word": 2}, unk_token="word"))
    return folder, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")


def make_trainer(folder: str, trainer: type, config: type, rewards: list[list[float | None]], **settings: Any) -> Any:
    """TRL's trainer with `settings`, whose reward functions give the columns of `rewards` [B, F]."""
    model, tokenizer = tiny_model(folder)

    def reward(column: int) -> Any:
        def column_of(prompts: list[str], **_: Any) -> list[float | None]:
            return [row[column] for row in rewards]

        column_of.__name__ = f"reward_{column}"
        return column_of

    size = len(rewards)
    settings = {"per_device_train_batch_size": size, "num_generations": GROUP, "steps_per_generation": 1, **settings}
    made = trainer(
        model=model,
        reward_funcs=[reward(column) for column in range(len(rewards[0]))],
        args=config(
            output_dir=folder,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_completion_length=LIMIT,
            **settings,
        ),
        # With a fingerprint, `datasets` does not pickle the table, which not every pyarrow lets it.
        train_dataset=Dataset(pyarrow.table({"prompt": ["word"] * size}), fingerprint="words"),
        processing_class=tokenizer,
    )
    made.model.train()
    made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps
    made.accelerator.gradient_state._set_sync_gradients(True)
    return made


def metrics_of(trainer: Any) -> dict[str, float]:
    """The metrics that TRL recorded, without those about generation."""
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def score(trainer: Any, batch: dict[str, Tensor] | None = None) -> dict[str, Any]:
    """Run `_generate_and_score_completions`: advantages and, with a batch, the rollout's correction."""
    size = trainer.args.per_device_train_batch_size
    lengths = [WIDTH] * size if batch is None else LENGTHS
    completions = [[2] * length for length in lengths]
    prompts = [[2]] * size
    texts = ["word"] * size
    if isinstance(trainer, RLOOTrainer):
        trainer._generate = lambda prompts_: (prompts, completions, texts)
    else:
        sampled = mask = None
        if batch is not None:
            sampled = [row[:length] for row, length in zip(batch["rollout_logprobs"].tolist(), lengths, strict=True)]
            mask = [row[:length] for row, length in zip(batch["mask"].long().tolist(), lengths, strict=True)]
        trainer._generate = lambda prompts_: (prompts, completions, mask, texts, sampled, {}, None, None)

    def logprobs_of(model: Any, *_: Any, **__: Any) -> tuple[Tensor | None, None, None]:
        if batch is None:
            return torch.zeros(size, WIDTH), None, None
        return batch["ref_logprobs" if model is trainer.ref_model else "old_logprobs"], None, None

    trainer._get_per_token_logps_and_entropies = logprobs_of
    return trainer._generate_and_score_completions([{"prompt": "word"} for _ in range(size)])


def loss_of(trainer: Any, batch: dict[str, Tensor], extra: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None]:
    """TRL's loss of the batch, and its gradients in logprobs and in entropies."""
    logprobs = batch["logprobs"].clone().requires_grad_()
    entropies = batch["entropies"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, entropies, None)
    size = len(logprobs)
    token = torch.full((size, 1), 2)
    inputs = {
        "prompt_ids": token,
        "prompt_mask": torch.ones_like(token),
        "completion_ids": token.expand(size, WIDTH),
        "completion_mask": batch["mask"],
        "advantages": batch["advantages"],
        "num_items_in_batch": batch["mask"].sum(),
        "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": batch["ref_logprobs"],
        **extra,
    }
    loss = trainer.compute_loss(trainer.model, inputs)
    return loss.detach(), *torch.autograd.grad(loss, (logprobs, entropies), allow_unused=True)


def advantage_cases(folder: str) -> list[dict[str, Any]]:
    """Rewards to advantages. No TRL of this version has a REINFORCE baseline but RLOO's."""
    one = [1.0, 0.0, 0.5, 0.25, -2.0, 3.0, 0.125, 0.0, 0.5, 0.5, 0.5, 0.5]  # the last group's are all equal
    two = [0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    single = [[reward] for reward in one]
    pairs = [[first, second] for first, second in zip(one, two, strict=True)]
    missing = [[None if row == 2 else reward] for row, reward in enumerate(one)]  # no reward function scored it
    grpo = partial(make_trainer, folder, GRPOTrainer, GRPOConfig)
    rloo = partial(make_trainer, folder, RLOOTrainer, RLOOConfig)
    gdpo = {"multi_objective_aggregation": "normalize_then_sum"}
    plain = {"normalize_advantages": False, "beta": 0.0}
    batch = BATCHES["ragged"]
    eight = single[: len(LENGTHS)]
    wanted = [
        ("grpo_group", grpo, single, {"scale_rewards": "group"}),
        ("grpo_batch", grpo, single, {"scale_rewards": "batch"}),
        ("grpo_none", grpo, single, {"scale_rewards": "none"}),
        ("grpo_unscored", grpo, missing, {"scale_rewards": "group"}),
        ("grpo_two_rewards", grpo, pairs, {"scale_rewards": "group", "reward_weights": [1.0, 0.5]}),
        ("gdpo_two_rewards", grpo, pairs, {"reward_weights": [1.0, 0.5], **gdpo}),
        ("rloo", rloo, single, plain),
        ("rloo_unscored", rloo, missing, plain),
        ("rloo_clipped_rewards", rloo, single, {**plain, "reward_clip_range": (-1.0, 1.0)}),
        ("rloo_normalised", rloo, single, {**plain, "normalize_advantages": True}),
        ("rloo_kl_in_reward", rloo, eight, {**plain, "beta": 0.25}),
    ]
    cases = []
    for name, make, rewards, settings in wanted:
        trainer = make(rewards, **settings)
        with_batch = settings.get("beta", 0.0) != 0.0
        out = score(trainer, batch if with_batch else None)
        cases.append(
            {
                "name": name,
                "made_by": f"{type(trainer).__name__}._generate_and_score_completions",
                **({"batch": "ragged"} if with_batch else {}),
                "settings": {"group": GROUP, **settings, "std": "sample (divided by n - 1)", "eps_added_to_std": 1e-4},
                "inputs": {"rewards": rewards},
                "outputs": lists({"advantages": out["advantages"], "metrics": metrics_of(trainer)}),
            }
        )
    return cases


def no_rewards(batch: dict[str, Tensor]) -> list[list[float | None]]:
    """Rewards for a trainer whose advantages come from the batch."""
    return [[0.0]] * len(batch["mask"])


def rollout_cases(folder: str) -> list[dict[str, Any]]:
    """The correction of a rollout by another engine: its weights, and the loss that they weigh."""
    cases = []
    bounds = ((None, "ragged"), (0.8, "ragged"), (0.8, "holes"))
    for level, kind, (low, batch_name) in product(("token", "sequence"), ("truncate", "mask"), bounds):
        batch = BATCHES[batch_name]
        settings = {
            "vllm_importance_sampling_mode": f"{level}_{kind}",
            "vllm_importance_sampling_clip_min": low,
            "vllm_importance_sampling_clip_max": 1.25,
            "loss_type": "dapo",
            "beta": 0.0,
        }
        trainer = make_trainer(folder, GRPOTrainer, GRPOConfig, no_rewards(batch), **settings)
        trainer.use_vllm = True  # in TRL's constructor it would start an engine
        weights = score(trainer, batch)["importance_sampling_ratio"]
        sampling = {name: value for name, value in metrics_of(trainer).items() if name.startswith("sampling")}
        loss, gradient, _ = loss_of(trainer, batch, {"importance_sampling_ratio": weights})
        cases.append(
            {
                "name": f"{level}_{kind}_{'both_sides' if low else 'above'}_{batch_name}",
                "made_by": "GRPOTrainer._generate_and_score_completions, then GRPOTrainer.compute_loss",
                "batch": batch_name,
                "settings": {**settings, "epsilon": 0.2, "normaliser": NORMALISERS["dapo"]},
                "outputs": lists({"weights": weights, "loss": loss, "gradient": gradient, "metrics": sampling}),
            }
        )
    return cases


TOKEN_LOSSES = ("grpo", "bnpo", "dapo", "dr_grpo")
GSPO = {"importance_sampling_level": "sequence", "epsilon": 0.1}
PLAIN_KL = {"beta": 0.1, "use_bias_correction_kl": False}  # TRL's default is True
LOSSES: list[tuple[str, str, dict[str, Any]]] = [
    *((f"{kind}_{batch}", batch, {"loss_type": kind}) for kind in TOKEN_LOSSES for batch in BATCHES),
    ("clip_higher", "ragged", {"loss_type": "dapo", "epsilon": 0.2, "epsilon_high": 0.4}),
    ("clip_wide", "ragged", {"loss_type": "dapo", "epsilon": 10.0, "epsilon_high": 10.0}),
    ("two_sided", "ragged", {"loss_type": "dapo", "delta": 1.3}),
    ("two_sided_clip_higher", "ragged", {"loss_type": "grpo", "epsilon_high": 0.28, "delta": 1.4}),
    ("kl_dapo", "ragged", {"loss_type": "dapo", **PLAIN_KL}),
    ("kl_grpo", "holes", {"loss_type": "grpo", **PLAIN_KL}),
    ("kl_dr_grpo", "ragged", {"loss_type": "dr_grpo", **PLAIN_KL}),
    ("kl_on_policy", "on_policy", {"loss_type": "dapo", **PLAIN_KL}),
    ("kl_corrected", "ragged", {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True}),
    ("kl_corrected_on_policy", "on_policy", {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True}),
    ("gspo", "ragged", {"loss_type": "grpo", **GSPO}),
    ("gspo_holes", "holes", {"loss_type": "grpo", **GSPO}),
    ("gspo_kl", "ragged", {"loss_type": "grpo", **GSPO, **PLAIN_KL}),
    ("gspo_token_mean", "ragged", {"loss_type": "dapo", **GSPO}),
    ("cispo", "ragged", {"loss_type": "cispo", "epsilon_high": 1.2}),
    ("sapo", "ragged", {"loss_type": "sapo"}),
    ("vespo", "ragged", {"loss_type": "vespo"}),
    ("luspo", "ragged", {"loss_type": "luspo", **GSPO}),
    ("top_entropy", "ragged", {"loss_type": "dapo", "top_entropy_quantile": 0.3}),
    ("entropy_bonus", "ragged", {"loss_type": "grpo", "entropy_coef": 0.01}),
    ("off_policy_mask", "ragged", {"loss_type": "dapo", "off_policy_mask_threshold": 0.05}),
]
# Read back from the trainer's own arguments, so that a case says every setting that its loss depends on.
SETTINGS = (
    "loss_type importance_sampling_level epsilon epsilon_high delta beta use_bias_correction_kl top_entropy_quantile "
    "entropy_coef off_policy_mask_threshold sapo_temperature_pos sapo_temperature_neg vespo_k_pos vespo_lambda_pos "
    "vespo_k_neg vespo_lambda_neg max_completion_length"
).split()


def settings_of(trainer: Any) -> dict[str, Any]:
    """What the trainer's loss depends on, without the settings that only another loss has."""
    loss_type = trainer.args.loss_type
    other = tuple(f"{name}_" for name in ("sapo", "vespo") if name != loss_type)
    given = {name: getattr(trainer.args, name) for name in SETTINGS if not name.startswith(other)}
    return {**given, "normaliser": NORMALISERS[loss_type]}


def loss_cases(folder: str) -> list[dict[str, Any]]:
    """The loss of a whole batch, and its gradient."""
    cases = []
    for name, batch_name, settings in LOSSES:
        batch = BATCHES[batch_name]
        trainer = make_trainer(folder, GRPOTrainer, GRPOConfig, no_rewards(batch), **settings)
        loss, gradient, entropy_gradient = loss_of(trainer, batch, {})
        outputs = {"loss": loss, "gradient": gradient, "metrics": metrics_of(trainer)}
        if entropy_gradient is not None:
            outputs["entropy_gradient"] = entropy_gradient
        cases.append(
            {
                "name": name,
                "made_by": "GRPOTrainer.compute_loss",
                "batch": batch_name,
                "settings": settings_of(trainer),
                "outputs": lists(outputs),
            }
        )
    return cases


def micro_batch_cases(folder: str) -> list[dict[str, Any]]:
    """A batch in two micro batches of four, whose gradients TRL adds."""
    batch = BATCHES["ragged"]
    cases = []
    for loss_type in TOKEN_LOSSES:
        settings = {
            "loss_type": loss_type,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "steps_per_generation": 2,
        }
        trainer = make_trainer(folder, GRPOTrainer, GRPOConfig, no_rewards(batch), **settings)
        parts = [{name: tensor[rows] for name, tensor in batch.items()} for rows in (slice(0, 4), slice(4, 8))]
        tokens = {"num_items_in_batch": batch["mask"].sum()}
        found = [loss_of(trainer, part, tokens)[:2] for part in parts]
        cases.append(
            {
                "name": loss_type,
                "made_by": "GRPOTrainer.compute_loss, once per micro batch",
                "batch": "ragged",
                "settings": {
                    **settings_of(trainer),
                    "accumulation": "none: the sum is over the global batch's tokens already"
                    if loss_type == "dapo"
                    else "each micro batch's loss is divided by the number of micro batches, 2",
                    "parts": [[0, 4], [4, 8]],
                },
                "outputs": lists(
                    {
                        "losses": [loss.item() for loss, _ in found],
                        "gradient": torch.cat([gradient for _, gradient in found]),
                    }
                ),
            }
        )
    return cases


def rloo_loss_cases(folder: str) -> list[dict[str, Any]]:
    """RLOO's loss, whose ratio is that of whole sequences: exp of the sum, not the mean, over their tokens."""
    cases = []
    for batch_name in ("ragged", "holes"):
        batch = BATCHES[batch_name]
        trainer = make_trainer(folder, RLOOTrainer, RLOOConfig, no_rewards(batch), beta=0.0, epsilon=0.4)
        old = (batch["old_logprobs"] * batch["mask"]).sum(1)
        loss, gradient, _ = loss_of(trainer, batch, {"old_logps": old})
        cases.append(
            {
                "name": f"rloo_{batch_name}",
                "made_by": "RLOOTrainer.compute_loss",
                "batch": batch_name,
                "settings": {
                    "epsilon": 0.4,
                    "ratio": "exp of the sum over a sequence's tokens",
                    "normaliser": "mean over the B sequences, one loss a sequence",
                },
                "outputs": lists({"loss": loss, "gradient": gradient, "metrics": metrics_of(trainer)}),
            }
        )
    return cases


def main() -> None:
    torch.set_default_dtype(torch.float64)
    with tempfile.TemporaryDirectory() as folder:
        numbers = {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "dtype": "float64",
            "batches": lists(BATCHES),
            "advantages": advantage_cases(folder),
            "losses": loss_cases(folder),
            "rloo_losses": rloo_loss_cases(folder),
            "micro_batches": micro_batch_cases(folder),
            "rollout_correction": rollout_cases(folder),
        }
    write("trl.json", numbers)


if __name__ == "__main__":
    main()

"""Tests reading recipes: valid ones load, and every mistake gets an exact message, which is part of the interface."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import hybrid3d
from hybrid3d.config import (
    Agents,
    Machine,
    Recipe,
    RecipeError,
    Rollout,
    Train,
    load_recipe,
    recipe_from_yaml,
    recipe_to_ascii,
    recipe_to_yaml,
)
from hybrid3d.config.sections.algorithm import Kl
from hybrid3d.generation.agents.program import find_agent_problems

# The recipe of the design's contracts, letter by letter.
NAMES = (
    "grpo, dr_grpo, dapo, gspo, rloo, reinforce_pp, reinforce_pp_baseline, ppo, grpo_passk, opo, remax, gpg, cispo, "
    "sapo, gmpo, clip_cov, kl_cov, dppo, sft, dpo"
)

PATH = "expected a string, not empty, of printable characters, at most 200 bytes a name"

DEMO = """\
name: demo-cpu
model:     {path: build/demo/model, dtype: float32}
train:     {tp: 2, pp: 2, vpp: 1, ep: 1, etp: 1, cp: 1, dp: 1}
rollout:   {tp: 2, expert_parallel: false, max_model_len: 256, max_new_tokens: 16, temperature: 1.0}
sync:      {bucket_mib: 64, verify: never}
data:      {train: build/demo/train.parquet, eval: build/demo/eval.parquet, prompt: question, answer: answer}
reward:    {name: gsm8k}
algorithm: {name: grpo, prompts_per_step: 32, samples_per_prompt: 8, clip: 0.2, kl: {where: loss, estimator: k3, coef: 0.001}}
optimizer: {lr: 1.0e-4, clip_grad: 1.0}
run:       {steps: 80, eval_every: 10, checkpoint_every: 40, seed: 1}
machine:   {gpus_per_node: 8, kind: h100-8x400g}
"""  # noqa: E501

SFT = """\
name: warm-up
model: {path: build/demo/base}
data: {train: a.parquet, eval: b.parquet}
algorithm: {name: sft, prompts_per_step: 64}
optimizer: {lr: 0.001}
run: {steps: 200}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load_text(text: str = DEMO, overrides: Sequence[str] = ()) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return load_recipe(path, overrides)

    return load_text


def problems(load: Any, *overrides: str, text: str = DEMO) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(text, overrides)
    return list(caught.value.problems)


# ---- what loads


def test_recipe_of_the_contracts_loads_as_it_stands(load: Any) -> None:
    recipe = load()
    assert recipe.name == "demo-cpu"
    assert recipe.train == Train(tp=2, pp=2, vpp=1, ep=1, etp=1, cp=1, dp=1, micro_batch_size=8)
    assert recipe.rollout == Rollout(
        tp=2,
        expert_parallel=False,
        max_model_len=256,
        max_new_tokens=16,
        temperature=1.0,
        gpu_memory_utilization=0.5,
        kv_cache_gib=1.0,
    )
    assert recipe.sync.bucket_mib == 64.0
    assert type(recipe.sync.bucket_mib) is float
    assert recipe.algorithm.kl == Kl(where="loss", estimator="k3", coef=0.001)
    assert recipe.optimizer.lr == 1e-4
    assert recipe.run.checkpoint_every == 40
    assert recipe.machine == Machine(gpus_per_node=8, kind="h100-8x400g")
    assert recipe.world_size == 4
    assert recipe.sequences_per_step == 256


def test_defaults(load: Any) -> None:
    recipe = load(SFT)
    assert yaml.safe_load(recipe_to_yaml(recipe)) == {
        "name": "warm-up",
        "model": {"path": "build/demo/base", "dtype": "float32"},
        "lora": None,
        "train": {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "cp": 1, "dp": 1}
        | {"first_stage_layers": None, "last_stage_layers": None, "expert_bias_update_rate": 0.0}
        | {
            "micro_batch_size": 8,
            "packed": False,
            "max_tokens_per_micro_batch": None,
            "recompute": "none",
            "fp8": "none",
            "router_replay": "none",
            "mtp_loss_coef": 0.0,
        }
        | {"offload_parameters": False, "offload_gradients": False, "offload_optimizer": False},
        "rollout": None,
        "roles": {
            "generation": {"ranks": None, "active_ranks": None, "ranks_at_start": None, "max_restarts": 10},
            "reward": {"ranks": None, "tp": 1, "pp": 1, "ep": 1, "max_restarts": 10},
        },
        "async": {"max_staleness": 0, "partial": None, "batches_in_flight": 2} | {"late_answers": "wait"},
        "sync": {"bucket_mib": 64.0, "verify": "never", "overlap": True, "delta": "auto", "shared_memory": "auto"}
        | {"transport": "collective"},
        "data": {
            "train": "a.parquet",
            "eval": "b.parquet",
            "prompt": "question",
            "answer": "answer",
            "chosen": "chosen",
            "rejected": "rejected",
            "chat_template": False,
            "overlong": "error",
            "max_invalid_fraction": 0.01,
            "date": "2024-07-26",
        },
        "evaluation": {"samples": 1, "temperature": 0.0, "top_p": 1.0, "k": [], "data": {}},
        "reward": {
            "name": "gsm8k",
            "model": None,
            "workers": 2,
            "timeout_seconds": 10.0,
            "default": 0.0,
            "max_failures": 1.0,
            "min": None,
            "max": None,
            "whiten": False,
            "coef": 1.0,
            "overlong_buffer": 0,
        },
        "algorithm": {
            "name": "sft",
            "prompts_per_step": 64,
            "samples_per_prompt": 1,
            "epochs": 1,
            "minibatches": 1,
            **dict.fromkeys(("advantage", "advantage_scale", "policy_loss", "ratio", "clip", "clip_high", "dual_clip")),
            "loss_agg_mode": None,
            "entropy_coef": 0.0,
            "mask_truncated": False,
            "high_entropy_fraction": None,
            "gamma": 1.0,
            "lam": 1.0,
            "dynamic_sampling": None,
            "loss": {"tau_positive": 1.0, "tau_negative": 1.05, "cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0}
            | {"cov_kl_coef": 1.0, "max_ratio": 20.0},
            "preference": {"loss_type": "sigmoid", "beta": 0.1, "label_smoothing": 0.0, "simpo_gamma": 0.5}
            | {"sft_coef": 0.0},
            "correction": {"kind": "none", "low": 0.5, "high": 2.0, "normalize": False, "bypass": False},
            "kl": {"where": "none", "estimator": None, "coef": 0.0, "target": None, "horizon": 10_000}
            | {"reference": None, "endpoint": None, "clamp": None, "ratio_weighted": False},
        },
        "optimizer": {
            "lr": 0.001,
            "clip_grad": 1.0,
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.999,
            "eps": 1e-8,
            "warmup_steps": 0,
            "schedule": "constant",
            "min_lr": 0.0,
        },
        "critic": {"path": None, "clip": 0.2, "warmup_steps": 0, "optimizer": None},
        "guard": {"spike": None, "kl_explosion": None, "max_interventions": 3, "initial_mismatch": "stop"}
        | dict.fromkeys(("max_kl", "max_clip_fraction", "max_grad_norm", "min_entropy", "max_mismatch_kl"))
        | dict.fromkeys(("max_sync_share", "max_memory_gb", "min_tokens_per_second")),
        "run": {
            "steps": 200,
            "eval_every": 10,
            "checkpoint_every": 0,
            "keep_last": 0,
            "async_checkpoints": False,
            "optimizer_sharding": "auto",
            "record": "never",
            "max_restarts": 0,
            "seed": 1,
            "dir": "runs",
        },
        "tracking": [],
        "schedule": {},
        "machine": {"gpus_per_node": 8, "kind": "h100-8x400g"}
        | dict.fromkeys(("memory_gb", "copies_gb_per_s", "nvlink_gb_per_s", "network_gb_per_s")),
        "debug": {"placement": "overlap", "shuffle_rewards": False},
    }


@pytest.mark.parametrize(("where", "estimator"), [("reward", "k1"), ("loss", "k3")])
def test_kl_is_estimated_by_what_holds_a_policy_there(load: Any, where: str, estimator: str) -> None:
    assert load(DEMO, [f"algorithm.kl={{where: {where}, coef: 0.1}}"]).algorithm.kl.effective_estimator == estimator
    assert (
        load(DEMO, [f"algorithm.kl={{where: {where}, coef: 0.1, estimator: k2}}"]).algorithm.kl.effective_estimator
        == "k2"
    )


def test_world_size_multiplies_tp_pp_cp_dp_only(load: Any) -> None:
    train = Train(tp=2, pp=3, cp=5, dp=7, vpp=11, ep=13, etp=17)
    assert replace(load(), train=train).world_size == 210


@pytest.mark.parametrize(
    ("name", "samples", "sequences"),
    [
        ("grpo", "samples_per_prompt: 8", 256),
        ("sft", "samples_per_prompt: 1", 32),
        ("dpo", "samples_per_prompt: 1", 64),
    ],
)
def test_sft_has_one_sequence_per_prompt_and_dpo_two(load: Any, name: str, samples: str, sequences: int) -> None:
    assert load(DEMO, [f"algorithm={{name: {name}, prompts_per_step: 32, {samples}}}"]).sequences_per_step == sequences


@pytest.mark.parametrize("text", [DEMO, SFT, DEMO.replace("demo-cpu", "日本-1").replace("1.0e-4", "3e-7")])
def test_yaml_round_trip(load: Any, text: str) -> None:
    recipe = load(text)
    assert load(recipe_to_yaml(recipe)) == recipe


def test_yaml_for_a_variable_is_ascii(load: Any) -> None:
    """Locales have other encodings, and some have no such characters."""
    recipe = load(DEMO.replace("demo-cpu", "日本-1"))
    text = recipe_to_ascii(recipe)
    assert text.isascii()
    assert recipe_from_yaml(text, "a rank's") == recipe


def test_overrides_are_yaml_and_may_add_a_section(load: Any) -> None:
    recipe = load(
        SFT,
        [
            "algorithm.name=grpo",
            "train.tp=4",
            "algorithm.kl={where: loss, coef: 0}",
            "algorithm.kl.coef=0.5",
            "rollout.max_model_len=9",
            "rollout.max_new_tokens=3",
            "rollout.expert_parallel=true",
            "name=other",
            "run.dir=a=b",
        ],
    )
    assert recipe.train.tp == 4
    assert recipe.algorithm.kl == Kl(where="loss", coef=0.5)
    assert recipe.rollout == Rollout(max_model_len=9, max_new_tokens=3, expert_parallel=True)
    assert (recipe.name, recipe.run.dir) == ("other", "a=b")


def test_overrides_fill_a_section_that_is_null(load: Any) -> None:
    """`recipe_to_yaml` writes `rollout: null` for a recipe without rollout."""
    overrides = ["rollout.max_model_len=9", "rollout.max_new_tokens=3"]
    assert load(recipe_to_yaml(load(SFT)), overrides).rollout == Rollout(max_model_len=9, max_new_tokens=3)


def test_later_override_wins(load: Any) -> None:
    assert load(DEMO, ["train.tp=1", "train.tp=4"]).train.tp == 4


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("'1e-4'", 1e-4), ("2", 2.0), ("2E+1", 20.0), (".5", 0.5), ("0", 0.0)]
)
def test_float_may_be_written_as_people_write_it(load: Any, text: str, value: float) -> None:
    lr = load(DEMO, [f"optimizer.lr={text}"]).optimizer.lr
    assert lr == value
    assert type(lr) is float


def test_config_imports_fast_and_without_torch() -> None:
    code = (
        "import sys, time; start = time.process_time(); import hybrid3d.config; print(time.process_time() - start)\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy', 'pyarrow', 'transformers'})"
    )
    source = Path(hybrid3d.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(source)}
    )
    seconds, heavy = done.stdout.splitlines()
    assert heavy == ""
    assert float(seconds) < 0.3  # of CPU time, which other work on the machine does not add to


# ---- what does not load, in the file alone


def test_recipe_error_has_every_problem_in_one_message(load: Any, tmp_path: Path) -> None:
    overrides = ["train.ttp=3", "train.pp=0", "run.seed=true", "optimizer.lr=fast", "data.columns=1", "reward.name=' '"]
    with pytest.raises(RecipeError) as caught:
        load(DEMO.replace("path: build/demo/model, ", ""), overrides)
    assert str(caught.value) == "\n  ".join(
        [
            f"{tmp_path / 'recipe.yaml'}:",
            f"model.path: missing, {PATH}",
            "train.ttp: unknown key, did you mean tp?; "
            "known keys of train: tp, pp, vpp, ep, etp, cp, dp, "
            "first_stage_layers, last_stage_layers, expert_bias_update_rate, micro_batch_size, packed, "
            "max_tokens_per_micro_batch, recompute, fp8, router_replay, mtp_loss_coef, offload_parameters, "
            "offload_gradients, offload_optimizer",
            "train.pp: expected an integer, 1 to 65,536, got 0 (an integer)",
            "data.columns: unknown key; known keys of data: train, eval, prompt, answer, chosen, rejected, "
            "chat_template, overlong, max_invalid_fraction, date",
            "reward.name: expected a string, not empty, of at most 1,000 printable characters, got ' ' (a string)",
            "optimizer.lr: expected a number, 0 to 100, got 'fast' (a string)",
            "run.seed: expected an integer, 0 to 4,294,967,295, got True (a boolean)",
        ]
    )


def test_error_survives_pickling(load: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        load(DEMO, ["train.tp=0"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.tp=2.0", "train.tp: expected an integer, 1 to 65,536, got 2.0 (a number)"),
        ("train.tp='2'", "train.tp: expected an integer, 1 to 65,536, got '2' (a string)"),
        ("train.tp=true", "train.tp: expected an integer, 1 to 65,536, got True (a boolean)"),
        ("train.tp=", "train.tp: expected an integer, 1 to 65,536, got nothing"),
        ("train.tp=[2]", "train.tp: expected an integer, 1 to 65,536, got [2] (a list)"),
        ("train.tp={a: 1}", "train.tp: expected an integer, 1 to 65,536, got a section"),
        ("train.tp=2024-01-02", "train.tp: expected an integer, 1 to 65,536, got datetime.date(2024, 1, 2) (date)"),
        ("train.tp=-1", "train.tp: expected an integer, 1 to 65,536, got -1 (an integer)"),
        ("train=2", "train: expected a section with keys, got 2 (an integer)"),
        ("train=", "train: expected a section with keys, got nothing"),
        ("rollout=[]", "rollout: expected a section with keys, got [] (a list)"),
        ("rollout.expert_parallel=1", "rollout.expert_parallel: expected a boolean, got 1 (an integer)"),
        ("data.chat_template='no'", "data.chat_template: expected a boolean, got 'no' (a string)"),
        ("optimizer.lr=true", "optimizer.lr: expected a number, 0 to 100, got True (a boolean)"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a number, 0 to 100, got nan (a number)"),
        ("optimizer.lr=.inf", "optimizer.lr: expected a number, 0 to 100, got inf (a number)"),
        ("optimizer.lr=nan", "optimizer.lr: expected a number, 0 to 100, got 'nan' (a string)"),
        ("optimizer.lr=1e999", "optimizer.lr: expected a number, 0 to 100, got '1e999' (a string)"),
        ("reward.default=.inf", "reward.default: expected a number, -1,000,000 to 1,000,000, got inf (a number)"),
        ("reward.max_failures=1.5", "reward.max_failures: expected a number, 0 to 1, got 1.5 (a number)"),
        (
            "data.overlong=truncate",
            "data.overlong: expected one of error, drop, truncate_left, got 'truncate' (a string), did you mean "
            "truncate_left?",
        ),
        ("optimizer.eps=0", "optimizer.eps: expected a number, more than 0 and at most 1e+12, got 0 (an integer)"),
        ("optimizer.beta1=1", "optimizer.beta1: expected a number, at least 0 and less than 1, got 1 (an integer)"),
        ("sync.bucket_mib=0", "sync.bucket_mib: expected a number, 0.01 to 16,384, got 0 (an integer)"),
        ("algorithm.clip=1", "algorithm.clip: expected a number, more than 0 and less than 1, got 1 (an integer)"),
        (
            "rollout.temperature=0.009",
            "rollout.temperature: expected a number, 0.01 to 100, because vLLM raises lower values to 0.01, "
            "got 0.009 (a number)",
        ),
        (
            "run.checkpoint_every=-1",
            "run.checkpoint_every: expected an integer, 0 to 1,000,000,000, got -1 (an integer)",
        ),
        ("run.eval_every=0", "run.eval_every: expected an integer, 1 to 1,000,000,000, got 0 (an integer)"),
        (
            "name=5",
            "name: expected a string, of letters, digits and . _ - only, at most 200 bytes, got 5 (an integer)",
        ),
        (
            "name=a/b",
            "name: expected a string, of letters, digits and . _ - only, at most 200 bytes, got 'a/b' (a string)",
        ),
        (
            "name=..",
            "name: expected a string, of letters, digits and . _ - only, at most 200 bytes, got '..' (a string)",
        ),
        ("model.dtype=16", "model.dtype: expected one of float32, bfloat16, got 16 (an integer)"),
        (
            "model.dtype=float16",
            "model.dtype: expected one of float32, bfloat16, got 'float16' (a string), did you mean bfloat16?",
        ),
        (
            "sync.verify=sometimes",
            "sync.verify: expected a string, always, never or every-N, got 'sometimes' (a string)",
        ),
        (
            "algorithm.name=gropo",
            f"algorithm.name: expected one of {NAMES}, got 'gropo' (a string), did you mean grpo?",
        ),
        (
            "algorithm.kl.estimator=[k3]",
            "algorithm.kl.estimator: expected one of k1, k1+, k2, k3, k3+, abs, abs+, got ['k3'] (a list)",
        ),
        ("algorithm.kl={where: loss}", "algorithm.kl.coef: missing, expected a number, 0 to 1,000"),
        ("algorithm.kl={coef: 1}", "algorithm.kl.where: missing, expected one of reward, loss, none"),
        (
            "algorithm.kl.coeff=0.1",
            "algorithm.kl.coeff: unknown key, did you mean coef?; known keys of algorithm.kl: where, reference, "
            "endpoint, estimator, clamp, ratio_weighted, coef, target, horizon",
        ),
        (
            "optimiser.lr=1",
            "optimiser: unknown key, did you mean optimizer?; known sections: name, model, lora, train, rollout, "
            "roles, async, sync, data, evaluation, reward, algorithm, optimizer, critic, guard, run, tracking, "
            "schedule, machine, debug",
        ),
        ("train", "override 'train': expected section.key=value"),
        ("=3", "override '=3': expected section.key=value"),
        ("train.=3", "override 'train.=3': expected section.key=value"),
        ("name.first=3", "override 'name.first=3': name is not a section but 'demo-cpu' (a string)"),
        (
            "train.tp=[1",
            "override 'train.tp=[1': not valid YAML: line 1, column 3: expected ',' or ']', but got '<stream end>'",
        ),
    ],
)
def test_recipe_mistake_makes_one_problem(load: Any, override: str, problem: str) -> None:
    found = problems(load, override)
    assert [" ".join(line.split()) for line in found] == [problem]


def test_required_keys_of_missing_sections_are_named(load: Any) -> None:
    assert problems(load, text="name: x\nrun: {}\n") == [
        f"model.path: missing, {PATH}",
        f"data.train: missing, {PATH}",
        f"data.eval: missing, {PATH}",
        f"algorithm.name: missing, expected one of {NAMES}",
        "algorithm.prompts_per_step: missing, expected an integer, 1 to 1,048,576",
        "optimizer.lr: missing, expected a number, 0 to 100",
        "run.steps: missing, expected an integer, 1 to 1,000,000,000",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "rollout=null",
            "rollout: missing, and algorithm.name=grpo generates: give max_model_len and max_new_tokens",
        ),
        (
            "algorithm.kl={where: none, coef: 0.001}",
            "algorithm.kl.coef=0.001 has no effect with algorithm.kl.where=none: set where: loss, or coef: 0",
        ),
        (
            "algorithm.kl.estimator=k1",
            "algorithm.kl.estimator=k1 has no gradient in the loss: set k1+, k2 or k3, ratio_weighted: true, or where: "
            "reward",
        ),
        (
            "algorithm.kl={where: reward, coef: 0.1, estimator: k3+}",
            "algorithm.kl.estimator=k3+: with algorithm.kl.where=reward the KL has no gradient: set k3",
        ),
        (
            "algorithm.kl={where: loss, coef: 0.1, target: 1, horizon: 51}",
            "algorithm.kl.horizon=51 is too short for the 256 answers of a step, which could change the coefficient's "
            "sign: at least 52; 2560 is ten steps",
        ),
        (
            "algorithm.kl={where: loss, coef: 0, target: 0.1}",
            "algorithm.kl.target=0.1 is approached by multiplying algorithm.kl.coef=0, which stays 0: set it above 0",
        ),
        (
            "algorithm.correction={kind: mask, high: 0.25}",
            "algorithm.correction.low=0.5 is not below algorithm.correction.high=0.25",
        ),
        ("critic.clip=0.5", "critic: algorithm.name=grpo has no critic: leave the section out, or set ppo"),
        (
            "guard.kl_explosion=5",
            "guard.kl_explosion=5.0: without algorithm.kl.target the coefficient is already fixed: "
            "leave it out, or set a target",
        ),
        (
            "reward.overlong_buffer=64",
            "reward.overlong_buffer=64 penalizes every answer of rollout.max_new_tokens=16: at most 15",
        ),
        (
            "rollout.quantization=fp8",
            "rollout.quantization=fp8: vLLM computes with weights in FP8 in bfloat16, and model.dtype=float32: "
            "set model.dtype=bfloat16, or leave rollout.quantization out",
        ),
        (
            "train.max_tokens_per_micro_batch=255",
            "train.max_tokens_per_micro_batch=255 has no room for a sequence of rollout.max_model_len=256 tokens: "
            "at least 256",
        ),
        (
            "optimizer={lr: 1e-4, schedule: linear, min_lr: 0.1}",
            "optimizer.min_lr=0.1 is more than optimizer.lr=0.0001, but the rate only decays: lower it",
        ),
        (
            "optimizer.warmup_steps=80",
            "optimizer.warmup_steps=80 leaves no step of run.steps=80 after warmup: at most 79",
        ),
    ],
)
def test_contradictions_within_a_recipe(load: Any, override: str, problem: str) -> None:
    assert problems(load, override) == [problem]


def test_padded_micro_batches_of_unlike_shapes_are_not_interleaved(load: Any) -> None:
    assert problems(load, "train.max_tokens_per_micro_batch=256", "train.vpp=2") == [
        "train.max_tokens_per_micro_batch=256: padded micro batches differ in shape, which the interleaved "
        "schedule (train.vpp=2) does not support: set train.packed=true, or train.vpp=1"
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("rollout.keep_weights=true", "rollout.keep_weights: no rank has both engines, so that vLLM never sleeps"),
        (
            "train.offload_optimizer=true",
            "train.offload_optimizer: no rank has both engines, so that Megatron never makes room",
        ),
    ],
)
def test_settings_of_colocated_ranks_are_refused_on_split_ranks(load: Any, override: str, problem: str) -> None:
    assert problems(load, "roles.generation.ranks=2", override) == [f"{problem}: leave it out"]


def test_generation_ahead_needs_ranks_of_its_own_and_correction(load: Any) -> None:
    assert problems(load, "async.max_staleness=1") == [
        "async.max_staleness=1: the ranks that train also generate: set roles.generation.ranks or async.partial",
        "async.max_staleness=1: older weights than those that are trained generate the samples, and "
        "algorithm.correction.kind=none does not correct for it: set truncate, mask, "
        "sequence_truncate, sequence_mask or sequence_mean_mask, or bypass: true",
    ]
    assert problems(load, "async.max_staleness=1", "roles.generation.ranks=2") == [
        "async.max_staleness=1: older weights than those that are trained generate the samples, and "
        "algorithm.correction.kind=none does not correct for it: set truncate, mask, "
        "sequence_truncate, sequence_mask or sequence_mean_mask, or bypass: true"
    ]
    corrected = ["algorithm.correction.kind=truncate", "roles.generation.ranks=2"]
    recipe = load(DEMO, ["async.max_staleness=1", *corrected])
    assert (recipe.world_size, recipe.train_ranks, recipe.generation_ranks) == (6, 4, 2)


def test_supervised_training_does_not_run_ahead(load: Any) -> None:
    found = problems(load, "algorithm.name=sft", "async.max_staleness=2")
    assert any(p.startswith("async.max_staleness=2 has no effect: algorithm.name=sft does not") for p in found)


def test_partial_rollouts_have_a_bound_and_whole_batches_no_say(load: Any) -> None:
    corrected = "algorithm.correction.kind=truncate"
    assert problems(load, "async.partial=continue", corrected) == [
        "async.partial=continue: async.max_staleness=0 lets no answer take longer than its step: set it to the number "
        "of steps that an answer may go on for"
    ]
    partial = ["async.partial=restart", "async.max_staleness=2", corrected]
    load(DEMO, [*partial, "async.batches_in_flight=3", "async.late_answers=drop"])
    kept = ["async.partial=continue_with_cache", *partial[1:]]
    load(DEMO, [*kept, "rollout.sleep=false"])
    assert problems(load, *kept) == [
        "async.partial=continue_with_cache: vLLM frees its KV cache while it sleeps: set rollout.sleep=false"
    ]
    assert problems(load, *partial, "async.batches_in_flight=4") == [
        "async.batches_in_flight=4: more than async.max_staleness + 1 = 3, so that prompts would be too old when they "
        "are trained: at most that"
    ]
    load(DEMO, [*partial, "algorithm.name=dapo"])
    experts = ["rollout.expert_parallel=true", "rollout.dp=2", "rollout.environment=calculator"]
    assert problems(load, *partial, *experts)[-1] == (
        "async.partial=restart: engines that share experts (rollout.dp=2) step together, and cannot wait for "
        "rollout.environment=calculator apart: set rollout.dp=1, or leave async.partial out"
    )
    assert problems(load, "async.late_answers=drop") == [
        "async.late_answers=drop has no effect: without async.partial a step waits for all of its answers: leave it "
        "out, or set it to wait"
    ]


def test_tp_group_that_fits_a_node_is_not_on_two(load: Any) -> None:
    split = ["roles.generation.ranks=8", "machine.gpus_per_node=8"]
    assert problems(load, *split, "rollout.tp=8") == [
        "rollout.tp=8: the TP group of ranks 4 to 11 would be on two nodes of machine.gpus_per_node=8 ranks: let the 4 "
        "ranks before it fill whole nodes, or choose a rollout.tp that divides both numbers"
    ]
    for fits in (["rollout.tp=4"], ["rollout.tp=8", "train.dp=2"], ["rollout.tp=16", "roles.generation.ranks=16"]):
        load(DEMO, [*split, *fits])


def test_ranks_that_may_come_later_fill_nodes(load: Any) -> None:
    split = ["roles.generation.ranks=8", "rollout.tp=2", "machine.gpus_per_node=4"]
    assert load(DEMO, split).late_ranks == range(12, 12)
    recipe = load(DEMO, [*split, "roles.generation.ranks_at_start=4"])
    assert (recipe.late_ranks, recipe.world_size) == (range(8, 12), 12)
    load(DEMO, [*split, "roles.generation.ranks_at_start=4", "roles.generation.active_ranks=2"])  # as a run may set it
    for number in (3, 10):
        assert problems(load, *split, f"roles.generation.ranks_at_start={number}")[0] == (
            f"roles.generation.ranks_at_start={number}: expected a multiple of rollout.tp x rollout.dp = 2, up to "
            "roles.generation.ranks=8"
        )
    assert problems(load, *split, "roles.generation.ranks_at_start=2") == [
        "roles.generation.ranks_at_start=2: ranks 6 to 11, which may come later, would share a node of "
        "machine.gpus_per_node=4 ranks with others: let the first 6 ranks fill whole nodes"
    ]
    scored = ["roles.reward={ranks: 2, tp: 2}", "reward.model=a/scorer", "roles.generation.ranks=6"]
    assert problems(load, *split, "roles.generation.ranks_at_start=4", *scored) == [
        "roles.generation.ranks_at_start=4: ranks 8 to 9, which may come later, would share a node of "
        "machine.gpus_per_node=4 ranks with others: let the first 10 ranks fill whole nodes"
    ]
    assert problems(load, "roles.generation.ranks_at_start=2") == [
        "roles.generation.ranks_at_start=2 has no effect: without roles.generation.ranks the ranks that train also "
        "generate: leave it out, or set it to null"
    ]


def test_ranks_that_compute_rewards_come_last(load: Any) -> None:
    recipe = load(DEMO, ["roles.generation.ranks=2", "roles.reward.ranks=3"])
    assert recipe.role_ranks == {"train": range(4), "generation": range(4, 6), "reward": range(6, 9)}
    assert recipe.ranks_formula == "train.tp x pp x cp x dp + roles.generation.ranks + roles.reward.ranks"
    assert (recipe.engine_ranks, recipe.scoring_role) == (6, "reward")  # without a model they need no GPU
    recipe = load(DEMO, ["roles.reward={ranks: 4, tp: 2, pp: 2, ep: 2}", "reward.model=a/scorer", "train.vpp=2"])
    assert recipe.role_ranks == {"train": range(4), "generation": range(4), "reward": range(4, 8)}
    assert (recipe.engine_ranks, recipe.sync_ranks, recipe.worker_group_size("reward")) == (8, 4, 4)
    layout = recipe.reward_layout
    assert (layout.tp, layout.pp, layout.ep, layout.dp, layout.vpp) == (2, 2, 2, 1, 1)


def test_settings_that_ranks_for_rewards_do_not_have_are_refused(load: Any) -> None:
    scored = ("reward.model=a/scorer", "roles.reward.ranks=4")
    assert problems(load, *scored, "roles.reward.tp=4", "roles.reward.pp=2") == [
        "roles.reward.ranks=4: expected a multiple of roles.reward.tp x roles.reward.pp = 8"
    ]
    assert problems(load, *scored, "roles.reward.ep=2") == [
        "roles.reward.ep=2 does not divide roles.reward.tp=1, whose ranks it regroups"
    ]
    assert problems(load, *scored, "roles.reward.tp=2", "machine.gpus_per_node=5") == [
        "roles.reward.tp=2: the TP group of ranks 4 to 5 would be on two nodes of machine.gpus_per_node=5 ranks: let "
        "the 4 ranks before it fill whole nodes, or choose a roles.reward.tp that divides both numbers"
    ]
    assert problems(load, "roles.reward.max_restarts=3") == [
        "roles.reward.max_restarts=3 has no effect: without roles.reward.ranks no rank only computes rewards: leave it "
        "out, or set it to 10"
    ]
    assert problems(load, "roles.reward.ranks=2", "roles.reward.tp=2") == [
        "roles.reward.tp=2 has no effect: without reward.model there is no model to distribute: leave it out, or set "
        "it to 1"
    ]
    assert any(
        "roles.reward.ranks=2: algorithm.name=sft has no rewards" in problem
        for problem in problems(load, "algorithm.name=sft", "roles.reward.ranks=2")
    )


def test_contradictions_borders_load(load: Any) -> None:
    falling = ["optimizer.min_lr=1e-4", "optimizer.schedule=linear"]
    recipe = load(DEMO, ["algorithm.kl={where: none, coef: 0}", "optimizer.warmup_steps=79", *falling])
    load(DEMO, ["train.max_tokens_per_micro_batch=256", "train.packed=true", "train.vpp=2"])
    assert recipe.optimizer.warmup_steps == 79


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: 1\nb: [1\nc: 2\n", "not valid YAML: line 3, column 2: expected ',' or ']', but got ':'"),
        (b"a: 1\n\tb: 2\n", "not valid YAML: line 2, column 1: found character '\\t' that cannot start any token"),
        (b"name: x\nrun: {steps: 1}\nrun: {steps: 2}\n", "not valid YAML: line 3, column 1: 'run' occurs twice"),
        (b"run:\n  steps: 1\n  steps: 2\n", "not valid YAML: line 3, column 3: 'steps' occurs twice"),
        (b"a: &x 1\nb: *y\n", "not valid YAML: line 2, column 4: found undefined alias 'y'"),
        (
            b"a: 2024-13-45\n",
            "not valid YAML: line 1, column 4: '2024-13-45' cannot be read as timestamp: month must be in 1..12",
        ),
        (b"", "expected sections with keys, got nothing"),
        (b"- 1\n", "expected sections with keys, got [1] (a list)"),
        (b"!!python/object:os.system x\n", None),
        (b"a: \x01", None),
    ],
)
def test_files_that_are_not_recipes(tmp_path: Path, content: bytes, problem: str | None) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    if problem is None:
        assert len(caught.value.problems) == 1
        assert caught.value.problems[0].startswith("not valid YAML: ")
        assert "\n" not in caught.value.problems[0]
    else:
        assert str(caught.value) == f"{path}:\n  {problem}"


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "none.yaml")
    assert str(caught.value) == f"{tmp_path}/none.yaml:\n  cannot be read: No such file or directory"
    with pytest.raises(RecipeError, match="cannot be read: it is a directory, and a regular file is expected"):
        load_recipe(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="is not a recipe: 'utf-8' codec can't decode byte 0xff in position 0"):
        load_recipe(tmp_path / "binary")


def test_unknown_keys_that_are_not_strings(load: Any) -> None:
    assert problems(load, text=SFT.replace("{steps: 200}", "{steps: 200, 7: 8}")) == [
        "run.7: unknown key; known keys of run: steps, eval_every, checkpoint_every, keep_last, async_checkpoints, "
        "optimizer_sharding, record, max_restarts, seed, dir"
    ]


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["critic.optimizer={lr: 0.001, min_lr: 0.01, schedule: cosine}"],
            "critic.optimizer.min_lr=0.01 is more than critic.optimizer.lr=0.001, but the rate only decays: lower it",
        ),
        (
            ["critic.warmup_steps=60", "optimizer.warmup_steps=20"],
            "optimizer.warmup_steps=20 leaves no step of run.steps=80 minus critic.warmup_steps=20 after warmup: "
            "at most 19",
        ),
        (
            ["critic.warmup_steps=80"],
            "critic.warmup_steps=80 leaves no step of run.steps=80 to train the policy: at most 79",
        ),
        (
            ["algorithm.kl={where: none, coef: 0}", "guard.max_kl=1"],
            "guard.max_kl=1.0: algorithm.kl.where=none measures no KL: leave it out, or set where: loss",
        ),
    ],
)
def test_ppo_refuses_settings_that_contradict_it(load: Any, overrides: list[str], problem: str) -> None:
    assert problems(load, "algorithm.name=ppo", *overrides) == [problem]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["guard.max_kl=1"], ["guard.max_kl=1.0: algorithm.name=sft has no metric that it bounds: leave it out"]),
        (
            ["guard.initial_mismatch=warn"],
            ["guard.initial_mismatch=warn: algorithm.name=sft generates nothing: leave it out"],
        ),
        (
            ["guard={max_grad_norm: 1, min_tokens_per_second: 1, kl_explosion: 2}"],
            ["guard.kl_explosion=2.0: algorithm.name=sft has no metric that it bounds: leave it out"],
        ),
        (
            ["train.offload_gradients=true"],
            ["train.offload_gradients: algorithm.name=sft never generates: leave it out"],
        ),
    ],
)
def test_sft_refuses_settings_that_contradict_it(load: Any, overrides: list[str], said: list[str]) -> None:
    assert problems(load, *overrides, text=SFT) == said


AGENTS = "rollout.agents.timeout_seconds=5"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["rollout.environment=calculator"], "agents take turns themselves: leave rollout.environment=calculator out"),
        (["reward.overlong_buffer=4"], "the length of an agent's answer is not that of one sequence"),
        (["rollout.expert_parallel=true", "rollout.dp=2"], "engines that share experts (rollout.dp=2) step together"),
    ],
)
def test_agents_refuse_settings_they_cannot_be_combined_with(load: Any, settings: list[str], problem: str) -> None:
    load(DEMO, [AGENTS, "reward.max_failures=0.5"])  # which a reward by name alone never has
    load(DEMO, [AGENTS, "reward.model=judge"])
    load(DEMO, [AGENTS, "roles.reward.ranks=2"])
    load(DEMO, [AGENTS, "async.partial=restart", "async.max_staleness=2", "algorithm.correction.kind=truncate"])
    assert any(found.startswith(f"rollout.agents: {problem}") for found in problems(load, AGENTS, *settings))


def test_agents_of_every_rank_have_a_port(load: Any) -> None:
    load(DEMO, ["rollout.agents.port=65532"])
    assert problems(load, "rollout.agents.port=65533") == [
        "rollout.agents.port=65533: the last of 4 ranks would listen at 65536: at most 65532"
    ]


def test_agents_need_a_key_where_other_machines_reach_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYBRID3D_API_KEY", raising=False)
    assert find_agent_problems(Agents()) == []
    assert find_agent_problems(Agents(host="0.0.0.0", command="no-such-agent --fast")) == [
        "rollout.agents.command: there is no program 'no-such-agent': give its path",
        "rollout.agents.host=0.0.0.0: other machines can reach it, so that agents need a key: set the environment "
        "variable HYBRID3D_API_KEY",
    ]
    assert find_agent_problems(Agents(command='python "agent.py'))[0].endswith("is no command: No closing quotation")
    monkeypatch.setenv("HYBRID3D_API_KEY", "secret")
    assert find_agent_problems(Agents(host="0.0.0.0", command="python agent.py")) == []

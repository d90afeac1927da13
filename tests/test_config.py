"""Recipes: what loads, and what each mistake is answered with. Messages are part of the product, so they are exact."""

import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import hybrid3d
from hybrid3d.config import (
    Kl,
    Machine,
    ModelShape,
    Recipe,
    RecipeError,
    Rollout,
    Train,
    check_layout,
    load_recipe,
    recipe_to_yaml,
)

# The recipe of the design's contracts, letter by letter.
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

# A 4-layer Qwen2-type model: 4 query heads, 2 key-value heads.
SHAPE = ModelShape(
    num_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    hidden_size=128,
    intermediate_size=256,
    vocab_size=500,
    max_position_embeddings=512,
)


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


def test_the_recipe_of_the_contracts_loads_as_it_stands(load: Any) -> None:
    recipe = load()
    assert recipe.name == "demo-cpu"
    assert recipe.train == Train(tp=2, pp=2, vpp=1, ep=1, etp=1, cp=1, dp=1, micro_batch_size=8)
    assert recipe.rollout == Rollout(
        tp=2,
        expert_parallel=False,
        max_model_len=256,
        max_new_tokens=16,
        temperature=1.0,
        memory_fraction=0.5,
        kv_cache_gib=1,
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
        "train": {"tp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "cp": 1, "dp": 1, "micro_batch_size": 8},
        "rollout": None,
        "sync": {"bucket_mib": 64.0, "verify": "never"},
        "data": {
            "train": "a.parquet",
            "eval": "b.parquet",
            "prompt": "question",
            "answer": "answer",
            "chat_template": False,
        },
        "reward": {"name": "gsm8k"},
        "algorithm": {
            "name": "sft",
            "prompts_per_step": 64,
            "samples_per_prompt": 1,
            "clip": 0.2,
            "kl": {"where": "none", "estimator": "k3", "coef": 0.0},
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
        "run": {"steps": 200, "eval_every": 10, "checkpoint_every": 0, "seed": 1, "dir": "runs"},
        "machine": {"gpus_per_node": 8, "kind": "h100-8x400g"},
    }


def test_world_size_multiplies_tp_pp_cp_dp_only(load: Any) -> None:
    train = Train(tp=2, pp=3, cp=5, dp=7, vpp=11, ep=13, etp=17)
    assert replace(load(), train=train).world_size == 210


@pytest.mark.parametrize(("name", "sequences"), [("grpo", 256), ("sft", 32)])
def test_sft_trains_on_one_sequence_a_prompt(load: Any, name: str, sequences: int) -> None:
    assert load(DEMO, [f"algorithm.name={name}"]).sequences_per_step == sequences


@pytest.mark.parametrize("text", [DEMO, SFT, DEMO.replace("demo-cpu", "日本-1").replace("1.0e-4", "3e-7")])
def test_yaml_round_trip(load: Any, text: str) -> None:
    recipe = load(text)
    assert load(recipe_to_yaml(recipe)) == recipe


def test_overrides_are_yaml_and_may_add_a_section(load: Any) -> None:
    recipe = load(
        SFT,
        [
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


def test_a_later_override_wins(load: Any) -> None:
    assert load(DEMO, ["train.tp=1", "train.tp=4"]).train.tp == 4


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("'1e-4'", 1e-4), ("2", 2.0), ("2E+1", 20.0), (".5", 0.5), ("0", 0.0)]
)
def test_a_float_may_be_written_as_people_write_it(load: Any, text: str, value: float) -> None:
    lr = load(DEMO, [f"optimizer.lr={text}"]).optimizer.lr
    assert lr == value
    assert type(lr) is float


def test_it_imports_without_torch_and_fast() -> None:
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


def test_every_problem_in_one_message(load: Any, tmp_path: Path) -> None:
    overrides = ["train.ttp=3", "train.pp=0", "run.seed=true", "optimizer.lr=fast", "data.columns=1", "reward.name=' '"]
    with pytest.raises(RecipeError) as caught:
        load(DEMO.replace("path: build/demo/model, ", ""), overrides)
    assert str(caught.value) == "\n  ".join(
        [
            f"{tmp_path / 'recipe.yaml'}:",
            "model.path: missing, expected a string, not empty",
            "train.ttp: unknown key, did you mean tp?; known keys of train: tp, pp, vpp, ep, etp, cp, dp, micro_batch_size",
            "train.pp: expected an integer, 1 or more, got 0 (an integer)",
            "data.columns: unknown key; known keys of data: train, eval, prompt, answer, chat_template",
            "reward.name: expected a string, not empty, got ' ' (a string)",
            "optimizer.lr: expected a number, 0 or more and finite, got 'fast' (a string)",
            "run.seed: expected an integer, 0 or more, got True (a boolean)",
        ]
    )


def test_the_error_survives_pickling(load: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        load(DEMO, ["train.tp=0"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value)
    assert isinstance(again, ValueError)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.tp=2.0", "train.tp: expected an integer, 1 or more, got 2.0 (a number)"),
        ("train.tp='2'", "train.tp: expected an integer, 1 or more, got '2' (a string)"),
        ("train.tp=true", "train.tp: expected an integer, 1 or more, got True (a boolean)"),
        ("train.tp=", "train.tp: expected an integer, 1 or more, got nothing"),
        ("train.tp=[2]", "train.tp: expected an integer, 1 or more, got [2] (a list)"),
        ("train.tp={a: 1}", "train.tp: expected an integer, 1 or more, got a section"),
        ("train.tp=2024-01-02", "train.tp: expected an integer, 1 or more, got datetime.date(2024, 1, 2) (date)"),
        ("train.tp=-1", "train.tp: expected an integer, 1 or more, got -1 (an integer)"),
        ("train=2", "train: expected a section with keys, got 2 (an integer)"),
        ("train=", "train: expected a section with keys, got nothing"),
        ("rollout=[]", "rollout: expected a section with keys, got [] (a list)"),
        ("rollout.expert_parallel=1", "rollout.expert_parallel: expected a boolean, got 1 (an integer)"),
        ("data.chat_template='no'", "data.chat_template: expected a boolean, got 'no' (a string)"),
        ("optimizer.lr=true", "optimizer.lr: expected a number, 0 or more and finite, got True (a boolean)"),
        ("optimizer.lr=.nan", "optimizer.lr: expected a number, 0 or more and finite, got nan (a number)"),
        ("optimizer.lr=.inf", "optimizer.lr: expected a number, 0 or more and finite, got inf (a number)"),
        ("optimizer.lr=nan", "optimizer.lr: expected a number, 0 or more and finite, got 'nan' (a string)"),
        ("optimizer.lr=1e999", "optimizer.lr: expected a number, 0 or more and finite, got '1e999' (a string)"),
        ("optimizer.eps=0", "optimizer.eps: expected a number, more than 0 and finite, got 0 (an integer)"),
        ("optimizer.beta1=1", "optimizer.beta1: expected a number, at least 0 and less than 1, got 1 (an integer)"),
        ("sync.bucket_mib=0", "sync.bucket_mib: expected a number, more than 0 and finite, got 0 (an integer)"),
        ("algorithm.clip=1", "algorithm.clip: expected a number, more than 0 and less than 1, got 1 (an integer)"),
        ("rollout.temperature=0", "rollout.temperature: expected a number, more than 0 and finite, got 0 (an integer)"),
        ("run.checkpoint_every=-1", "run.checkpoint_every: expected an integer, 0 or more, got -1 (an integer)"),
        ("run.eval_every=0", "run.eval_every: expected an integer, 1 or more, got 0 (an integer)"),
        ("name=5", "name: expected a string, of letters, digits and . _ - only, got 5 (an integer)"),
        ("name=a/b", "name: expected a string, of letters, digits and . _ - only, got 'a/b' (a string)"),
        ("name=..", "name: expected a string, of letters, digits and . _ - only, got '..' (a string)"),
        ("model.dtype=16", "model.dtype: expected one of float32, bfloat16, got 16 (an integer)"),
        (
            "model.dtype=float16",
            "model.dtype: expected one of float32, bfloat16, got 'float16' (a string), did you mean bfloat16?",
        ),
        (
            "sync.verify=sometimes",
            "sync.verify: expected one of never, always, got 'sometimes' (a string)",
        ),
        (
            "algorithm.name=gropo",
            "algorithm.name: expected one of grpo, sft, got 'gropo' (a string), did you mean grpo?",
        ),
        ("algorithm.kl.estimator=[k3]", "algorithm.kl.estimator: expected one of k3, got ['k3'] (a list)"),
        ("algorithm.kl={where: loss}", "algorithm.kl.coef: missing, expected a number, 0 or more and finite"),
        ("algorithm.kl={coef: 1}", "algorithm.kl.where: missing, expected one of loss, none"),
        (
            "algorithm.kl.coeff=0.1",
            "algorithm.kl.coeff: unknown key, did you mean coef?; known keys of algorithm.kl: where, estimator, coef",
        ),
        (
            "optimiser.lr=1",
            "optimiser: unknown key, did you mean optimizer?; known sections: name, model, train, rollout, sync, data, "
            "reward, algorithm, optimizer, run, machine",
        ),
        ("train", "override 'train': expected section.key=value"),
        ("=3", "override '=3': expected section.key=value"),
        ("train.=3", "override 'train.=3': expected section.key=value"),
        ("name.first=3", "override 'name.first=3': name is no section, it is 'demo-cpu' (a string)"),
        (
            "train.tp=[1",
            "override 'train.tp=[1': not valid YAML: line 1, column 3: expected ',' or ']', but got '<stream end>'",
        ),
    ],
)
def test_one_mistake_one_problem(load: Any, override: str, problem: str) -> None:
    found = problems(load, override)
    assert [" ".join(line.split()) for line in found] == [problem]


def test_required_keys_of_missing_sections_are_named(load: Any) -> None:
    assert problems(load, text="name: x\nrun: {}\n") == [
        "model.path: missing, expected a string, not empty",
        "data.train: missing, expected a string, not empty",
        "data.eval: missing, expected a string, not empty",
        "algorithm.name: missing, expected one of grpo, sft",
        "algorithm.prompts_per_step: missing, expected an integer, 1 or more",
        "optimizer.lr: missing, expected a number, 0 or more and finite",
        "run.steps: missing, expected an integer, 1 or more",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        (
            "rollout=null",
            "rollout: missing, and algorithm.name=grpo generates: give max_model_len and max_new_tokens",
        ),
        (
            "algorithm.kl.where=none",
            "algorithm.kl.coef=0.001 has no effect with algorithm.kl.where=none: set where: loss, or coef: 0",
        ),
        ("optimizer.min_lr=0.1", "optimizer.min_lr=0.1 is more than optimizer.lr=0.0001: the rate only falls"),
        ("optimizer.warmup_steps=80", "optimizer.warmup_steps=80 leaves no step of run.steps=80: at most 79"),
    ],
)
def test_contradictions_within_a_recipe(load: Any, override: str, problem: str) -> None:
    assert problems(load, override) == [problem]


def test_the_contradictions_borders_load(load: Any) -> None:
    recipe = load(DEMO, ["algorithm.kl={where: none, coef: 0}", "optimizer.min_lr=1e-4", "optimizer.warmup_steps=79"])
    assert recipe.optimizer.warmup_steps == 79


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"a: 1\nb: [1\nc: 2\n", "not valid YAML: line 3, column 2: expected ',' or ']', but got ':'"),
        (b"a: 1\n\tb: 2\n", "not valid YAML: line 2, column 1: found character '\\t' that cannot start any token"),
        (b"name: x\nrun: {steps: 1}\nrun: {steps: 2}\n", "not valid YAML: line 3, column 1: 'run' stands twice"),
        (b"run:\n  steps: 1\n  steps: 2\n", "not valid YAML: line 3, column 3: 'steps' stands twice"),
        (b"a: &x 1\nb: *y\n", "not valid YAML: line 2, column 4: found undefined alias 'y'"),
        (b"a: 2024-13-45\n", "not valid YAML: month must be in 1..12"),
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
    with pytest.raises(RecipeError, match="cannot be read: Is a directory"):
        load_recipe(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="not a text file: 'utf-8' codec can't decode byte 0xff in position 0"):
        load_recipe(tmp_path / "binary")


def test_unknown_keys_that_are_not_strings(load: Any) -> None:
    assert problems(load, text=SFT.replace("{steps: 200}", "{steps: 200, 7: 8}")) == [
        "run.7: unknown key; known keys of run: steps, eval_every, checkpoint_every, seed, dir"
    ]


# ---- the model's shape

CONFIG: dict[str, object] = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "vocab_size": 500,
    "max_position_embeddings": 512,
    "model_type": "qwen2",
}


def test_shape_from_config() -> None:
    assert ModelShape.from_config(CONFIG) == SHAPE
    assert ModelShape.from_config({**CONFIG, "head_dim": None}) == SHAPE
    assert ModelShape.from_config({**CONFIG, "head_dim": 64}) == replace(SHAPE, head_dim=64)
    without_groups = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    assert ModelShape.from_config(without_groups) == replace(SHAPE, num_key_value_heads=4)


def test_shape_from_a_broken_config() -> None:
    broken = {**CONFIG, "num_attention_heads": 3, "vocab_size": "many", "num_key_value_heads": 0}
    del broken["num_hidden_layers"]
    with pytest.raises(RecipeError) as caught:
        ModelShape.from_config(broken)
    assert list(caught.value.problems) == [
        "head_dim: missing, and num_attention_heads=3 does not divide hidden_size=128",
        "num_hidden_layers: missing",
        "num_key_value_heads: expected an integer, 1 or more, got 0 (an integer)",
        "vocab_size: expected an integer, 1 or more, got 'many' (a string)",
    ]


# ---- recipe against model


def misfits(
    load: Any, *overrides: str, shape: ModelShape = SHAPE, device: Literal["cpu", "cuda"] = "cpu", text: str = DEMO
) -> list[str]:
    """The problems of `check_layout`; none is an empty list."""
    try:
        check_layout(load(text, overrides), shape, device=device)
    except RecipeError as error:
        assert str(error).startswith("recipe ")
        return list(error.problems)
    return []


def test_the_demo_fits(load: Any) -> None:
    assert misfits(load) == []
    assert misfits(load, "train.micro_batch_size=64", text=SFT) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.tp=4", "train.pp=1"],  # more ranks than key-value heads, which vLLM and Megatron replicate
        ["train.tp=4", "train.pp=1", "rollout.tp=4"],
        ["train.tp=1", "train.pp=4", "rollout.tp=1"],
        ["train.tp=1", "train.dp=4", "train.pp=1"],
        ["train.vpp=2"],
        ["rollout.max_new_tokens=255"],
        ["rollout.max_model_len=512"],
        ["algorithm.prompts_per_step=2", "algorithm.samples_per_prompt=4"],
    ],
)
def test_layouts_that_fit(load: Any, overrides: list[str]) -> None:
    assert misfits(load, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["train.tp=3", "rollout.tp=1"],
            [
                "train.tp=3 does not divide num_attention_heads=4: nearest valid values of train.tp are 2, 4",
                "train.tp=3 and num_key_value_heads=2: one must divide the other: "
                "nearest valid values of train.tp are 2, 4",
                "train.tp=3 does not divide intermediate_size=256: nearest valid values of train.tp are 2, 4",
            ],
        ),
        (
            ["train.pp=3"],
            ["train.pp=3 does not divide num_hidden_layers=4: nearest valid values of train.pp are 2, 4"],
        ),
        (
            ["train.pp=8"],
            ["train.pp=8 does not divide num_hidden_layers=4: nearest valid value of train.pp is 4"],
        ),
        (
            ["train.vpp=3", "algorithm.prompts_per_step=64"],
            [
                "train.vpp=3 does not divide num_hidden_layers/train.pp=4/2=2: nearest valid value of train.vpp is 2",
            ],
        ),
        (
            ["train.pp=1", "train.vpp=2"],
            ["train.vpp=2 interleaves pipeline stages, and train.pp=1 has one: set train.vpp=1, or train.pp=2"],
        ),
        (
            ["train.ep=2", "train.etp=3", "train.cp=2"],
            [
                "train.ep=2 shards experts, and the model families of this version have none: the only valid value is 1",
                "train.etp=3 shards experts, and the model families of this version have none: the only valid value is 1",
                "train.cp=2 shards sequences, which this version does not: the only valid value is 1",
            ],
        ),
        (
            ["rollout.expert_parallel=true"],
            [
                "rollout.expert_parallel=true shards experts, and the model families of this version have none: "
                "the only valid value is false",
            ],
        ),
        (
            ["train.pp=1", "rollout.tp=4"],
            ["rollout.tp=4 does not divide the train.tp*pp*cp*dp=2 ranks: nearest valid value of rollout.tp is 2"],
        ),
        (
            ["rollout.max_new_tokens=256"],
            ["rollout.max_new_tokens=256 leaves no room for a prompt in rollout.max_model_len=256: at most 255"],
        ),
        (
            ["rollout.max_model_len=513"],
            ["rollout.max_model_len=513 is more than max_position_embeddings=512: at most 512"],
        ),
        (
            ["algorithm.samples_per_prompt=1"],
            ["algorithm.samples_per_prompt=1: grpo compares samples of one prompt, so it needs 2 or more"],
        ),
        (
            ["algorithm.prompts_per_step=33"],
            [
                "algorithm.prompts_per_step=33 is no multiple of the rollout replicas, ranks/rollout.tp=4/2=2: "
                "nearest valid values of algorithm.prompts_per_step are 32, 34",
            ],
        ),
        (
            # 32 * 8 = 256 is no multiple of 24: 3 prompts are, and 2 replicas need an even number of them.
            ["train.micro_batch_size=24"],
            [
                "algorithm.prompts_per_step=32 of 8 samples each is 256 sequences, no multiple of "
                "train.dp*train.micro_batch_size=1*24=24: nearest valid values of algorithm.prompts_per_step are 30, 36",
            ],
        ),
        (
            # Interleaved stages want micro batches in rounds of pp=2: 34 * 8 = 272 sequences make 17 micro batches of 16.
            ["train.vpp=2", "train.micro_batch_size=16", "algorithm.prompts_per_step=34"],
            [
                "algorithm.prompts_per_step=34 of 8 samples each is 272 sequences, no multiple of "
                "train.dp*train.micro_batch_size*train.pp=1*16*2=32: "
                "nearest valid values of algorithm.prompts_per_step are 32, 36",
            ],
        ),
        (
            ["train.dp=2", "train.micro_batch_size=1024"],
            [
                "algorithm.prompts_per_step=32 of 8 samples each is 256 sequences, no multiple of "
                "train.dp*train.micro_batch_size=2*1024=2048: "
                "nearest valid value of algorithm.prompts_per_step is 256",
            ],
        ),
    ],
)
def test_layouts_that_do_not_fit(load: Any, overrides: list[str], expected: list[str]) -> None:
    assert misfits(load, *overrides) == expected


def test_offered_values_keep_every_rule_of_their_key(load: Any) -> None:
    """6 and 12 divide the 12 heads, but not the intermediate size, so they are not offered."""
    shape = replace(SHAPE, num_attention_heads=12, num_key_value_heads=4)
    assert misfits(load, "train.tp=5", "train.pp=1", "rollout.tp=1", shape=shape) == [
        "train.tp=5 does not divide num_attention_heads=12: nearest valid value of train.tp is 4",
        "train.tp=5 and num_key_value_heads=4: one must divide the other: nearest valid value of train.tp is 4",
        "train.tp=5 does not divide intermediate_size=256: nearest valid value of train.tp is 4",
    ]


def test_the_vocabulary_as_vllm_pads_it(load: Any) -> None:
    """500 pads to 512, which 3 ranks cannot share; 570 pads to 576 = 3 x 192, and they can."""
    shape = replace(SHAPE, num_attention_heads=6, num_key_value_heads=3, intermediate_size=192, hidden_size=192)
    overrides = ["train.tp=3", "train.pp=1", "rollout.tp=3"]
    assert misfits(load, *overrides, shape=shape) == [
        "rollout.tp=3 does not divide vocab_size=500 as vLLM pads it, 512: nearest valid value of rollout.tp is 1"
    ]
    assert misfits(load, *overrides, shape=replace(shape, vocab_size=570)) == []


@pytest.mark.parametrize("head_dim", [16, 40, 120])
def test_head_dims_that_vllm_refuses_on_cpu(load: Any, head_dim: int) -> None:
    shape = replace(SHAPE, head_dim=head_dim)
    near = {16: "value of head_dim is 32", 40: "values of head_dim are 32, 64", 120: "values of head_dim are 112, 128"}
    assert misfits(load, shape=shape) == [
        f"head_dim={head_dim} is not supported by vLLM's attention on CPU: nearest valid {near[head_dim]}"
    ]
    assert misfits(load, shape=shape, device="cuda") == []
    assert misfits(load, shape=shape, text=SFT) == []


def test_sft_asks_nothing_of_replicas_or_samples(load: Any) -> None:
    overrides = ["algorithm.name=sft", "train.micro_batch_size=3", "algorithm.prompts_per_step=33"]
    assert misfits(load, *overrides) == []
    assert misfits(load, *overrides[:2]) == [
        "algorithm.prompts_per_step=32 is no multiple of train.dp*train.micro_batch_size=1*3=3: "
        "nearest valid values of algorithm.prompts_per_step are 30, 33"
    ]


def test_every_misfit_in_one_message(load: Any) -> None:
    with pytest.raises(RecipeError) as caught:
        check_layout(load(DEMO, ["train.ep=2", "train.pp=3", "rollout.max_model_len=600"]), SHAPE, device="cpu")
    assert str(caught.value).splitlines()[0] == "recipe demo-cpu does not fit its model:"
    assert [line.split("=")[0] for line in caught.value.problems] == ["train.ep", "train.pp", "rollout.max_model_len"]

"""What a recipe points at, broken in every way that we could think of: refused by name, before anything starts.

Every key of the model's config with every kind of wrong value, tokenizer files, data files and modules. A sample of it
runs with the fast tests, all of it in `make test-all`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bad_inputs import Bad, Harness, check_labels, sample
from hybrid3d import cli
from hybrid3d.launch import launcher
from hybrid3d.scoring import pool_client
from sound import write_inputs
from test_cli import RECIPE

SAMPLE = 60  # cases with the fast tests
KEPT = "kept"  # the folder of the sound files, from which each case starts
BIG = 10**18

VALUES: dict[str, Any] = {
    "text": "many",
    "list": [1, 2],
    "object": {"a": 1},
    "true": True,
    "half": 0.5,
    "negative": -1,
    "zero": 0,
    "huge": BIG,
    "vast": 10**40,
    "no-float": 10**400,
    "nan": float("nan"),
    "infinite": float("inf"),
    "null": None,
}
COUNTS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
COUNTS += ("vocab_size", "max_position_embeddings")
# Values of a key that are sound, or harmless.
SOUND: dict[str, tuple[str, ...]] = {
    "tie_word_embeddings": ("true", "null"),
    "use_sliding_window": ("null",),
    "attention_dropout": ("zero", "null"),
    "rope_parameters": ("null", "object"),
    "rope_scaling": ("null", "object"),
    "layer_types": ("null",),
    "eos_token_id": ("negative", "zero", "list", "null"),
    "bos_token_id": ("negative", "zero", "null"),
    "pad_token_id": ("negative", "zero", "null"),
    "max_window_layers": ("zero", "null"),
    "head_dim": ("null",),
    "hidden_act": ("null",),
    "text_config": ("null",),
    "quantization_config": ("null", "object"),
    "rms_norm_eps": ("half",),
}
KEYS = (*COUNTS, "model_type", "architectures", *SOUND)


def edit(work: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    path = work / "model" / file
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))


def set_in(file: str, key: str, value: Any) -> Callable[[Path], object]:
    return lambda work: edit(work, file, lambda config: config.update({key: value}))


def config_cases() -> Iterator[Bad]:
    for key in KEYS:
        for label, value in VALUES.items():
            if label not in SOUND.get(key, ()):
                prepare = set_in("config.json", key, value)
                words = "architecture" if key == "architectures" else key
                yield Bad(f"config-{key}-{label}", ("train", "recipe.yaml"), (words,), prepare)
    for key in (*COUNTS, "rms_norm_eps", "model_type", "architectures"):
        remove = lambda work, key=key: edit(work, "config.json", lambda config: config.pop(key))  # noqa: E731
        words = "architecture" if key == "architectures" else key
        yield Bad(f"config-{key}-left-out", ("plan", "recipe.yaml"), (words,), remove)
    for label in ("text", "list", "true", "negative", "zero", "huge", "nan", "no-float"):
        for name in ("rope_theta", "factor", "low_freq_factor", "original_max_position_embeddings"):
            table = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
            table |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64, name: VALUES[label]}
            if (name, label) not in (("low_freq_factor", "zero"), ("rope_theta", "huge")):
                prepare = set_in("config.json", "rope_parameters", table)
                yield Bad(f"rope-{name}-{label}", ("train", "recipe.yaml"), (name,), prepare)


TEXTS: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"a": ',
    "a-list": b"[]",
    "a-number": b"1",
    "no-text": b"\xff\xfe\x00\x01" * 8,
    "nested": b'{"a":' * 5000 + b"1" + b"}" * 5000,
    "twice": b'{"a": 1, "a": 2}',
    "surrogate": b'{"a": "\\ud800"}',
    "nul": b'{"a": "\\u0000"}',
    "digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "large": b'{"a": "' + b"x" * (65 * 2**20) + b'"}',
}


def overwrite(path: str, data: bytes) -> Callable[[Path], object]:
    return lambda work: (work / path).write_bytes(data)


def replaced(path: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    def prepare(work: Path) -> None:
        (work / path).unlink(missing_ok=True)
        make(work / path)

    return prepare


SPECIAL: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "dangling": lambda path: path.symlink_to("nowhere"),
}


def file_cases() -> Iterator[Bad]:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        for label, data in TEXTS.items():
            if label != "twice" or file == "config.json":
                yield Bad(f"{file}-{label}", ("train", "recipe.yaml"), (file,), overwrite(f"model/{file}", data))
        for label, make in SPECIAL.items():
            yield Bad(f"{file}-{label}", ("train", "recipe.yaml"), (file,), replaced(f"model/{file}", make))
    for key in ("data.train", "data.eval"):
        for label, make in SPECIAL.items():
            prepare = replaced("other.parquet", make)
            yield Bad(f"{key}-{label}", ("train", "recipe.yaml", f"{key}=other.parquet"), ("other.parquet",), prepare)
        for scheme in ("gs", "s3", "hdfs", "http", "https", "abfs", "file"):
            address = f"{scheme}://bucket/data.parquet"
            yield Bad(f"{key}-{scheme}", ("train", "recipe.yaml", f"{key}={address}"), (address, "address"))
    for scheme in ("gs", "s3", "hf", "http"):
        address = f"{scheme}://bucket/model"
        for command in ("train", "plan", "bench"):
            yield Bad(f"model-{command}-{scheme}", (command, "recipe.yaml", f"model.path={address}"), ("bucket/model",))
    for label, value in VALUES.items():
        if label not in ("zero", "list", "null"):
            prepare = set_in("generation_config.json", "eos_token_id", value)
            yield Bad(f"generation-{label}", ("train", "recipe.yaml"), ("generation_config.json",), prepare)
    reference = {"AutoTokenizer": ["evil.Evil", None], "AutoConfig": "evil.Config"}
    prepare = set_in("config.json", "auto_map", "evil")
    yield Bad("auto-map-text", ("train", "recipe.yaml"), ("auto_map",), prepare)
    for key, value in {"tokenizer_class": 5, "added_tokens_decoder": [1], "auto_map": reference}.items():
        change = lambda config, key=key, value=value: config.update({key: value, "eos_token": None})  # noqa: E731
        prepare = lambda work, change=change: edit(work, "tokenizer_config.json", change)  # noqa: E731
        yield Bad(f"tokenizer-config-{key}", ("train", "recipe.yaml"), ("tokenizer",), prepare)


def table(**columns: Any) -> Callable[[Path], object]:
    return lambda work: pq.write_table(pa.table(columns), work / "other.parquet")


def write_twice(work: Path) -> None:
    columns = [pa.array(["a"]), pa.array(["b"]), pa.array(["c"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["question", "question", "answer"]), work / "other.parquet")


def write_many(work: Path) -> None:
    """Eleven million rows of one value: 100 kB."""
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 1_000_000, pa.int8()), ["a"])
    part = pa.table({"question": repeated, "answer": repeated})
    with pq.ParquetWriter(work / "other.parquet", part.schema) as writer:
        for _ in range(11):
            writer.write_table(part)


def write_surrogate(work: Path) -> None:
    """A string column whose bytes are half of a surrogate pair in UTF-8."""
    data = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"\xed\xa0\x80")]
    )
    pq.write_table(pa.table({"question": data, "answer": ["1"]}), work / "other.parquet")


DATA: dict[str, Callable[[Path], object]] = {
    "no-rows": table(question=pa.array([], pa.string()), answer=pa.array([], pa.string())),
    "numbers": table(question=[1], answer=["1"]),
    "number-answers": table(question=["a"], answer=[1]),
    "bytes": table(question=[b"a"], answer=["1"]),
    "lists": table(question=[["a"]], answer=["1"]),
    "structs": table(question=[{"text": "a"}], answer=["1"]),
    "maps": table(question=pa.array([[("a", "b")]], pa.map_(pa.string(), pa.string())), answer=["1"]),
    "nulls": table(question=pa.array([None], pa.null()), answer=["1"]),
    "null-texts": table(question=pa.array([None], pa.string()), answer=["1"]),
    "blank": table(question=["  "], answer=["1"]),
    "number-dictionary": table(question=pa.array([1]).dictionary_encode(), answer=["1"]),
    "times": table(question=pa.array([0], pa.timestamp("s")), answer=["1"]),
    "turns": table(question=[[{"role": "user", "content": "a"}]], answer=["1"]),
    "no-question": table(answer=["1"]),
    "column-twice": write_twice,
    "many-rows": write_many,
    "surrogate": write_surrogate,
    "long": table(question=["1 + 1 = " * 200], answer=["1"]),
    "empty-file": overwrite("other.parquet", b""),
    "magic-alone": overwrite("other.parquet", b"PAR1PAR1"),
    "lying-footer": overwrite("other.parquet", b"PAR1" + b"\0" * 64 + b"\xff\xff\xff\x7fPAR1"),
    "text": overwrite("other.parquet", b"question,answer\n1,2\n"),
}


def data_cases() -> Iterator[Bad]:
    for key in ("data.train", "data.eval"):
        for label, prepare in DATA.items():
            arguments = ("train", "recipe.yaml", f"{key}=other.parquet", "rollout.max_model_len=128")
            yield Bad(f"{key}-{label}", arguments, ("other.parquet",), prepare)


TEMPLATES = {
    "raises": "{{ raise_exception('no') }}",
    "divides": "{{ 1 // 0 }}",
    "unknown": "{{ messages.a.b }}",
    "syntax": "{% for %}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "allocates": "{{ 'a' * 10000000000 }}",
    "recurses": "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "empty": "",
    "long": "{{ 'a ' * 20000000 }}",
    "number": 5,
    "list": [1],
}


def template_cases() -> Iterator[Bad]:
    for label, template in TEMPLATES.items():
        prepare = set_in("tokenizer_config.json", "chat_template", template)
        said = "tokenizer" if label == "list" else "template"
        yield Bad(f"template-{label}", ("train", "recipe.yaml", "data.chat_template=true"), (said,), prepare)


MODULES = {
    "exits": "import os; os._exit(0)",
    "exits-with-3": "import os; os._exit(3)",
    "system-exit": "raise SystemExit(0)",
    "raises": "raise RuntimeError('no')",
    "syntax": "def f(:",
    "lacks": "x = 1",
    "kills": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "recurses": "def f(): f()\nf()",
    "no-function": "f = 5",
    "no-arguments": "def f(): return 1",
    "prints-and-exits": "import os; print('[]', flush=True); os._exit(0)",
    "reads-stdin": "x = input()",
}


def module_cases() -> Iterator[Bad]:
    for label, source in MODULES.items():
        for key in ("reward.name", "rollout.environment"):
            prepare = overwrite("users.py", source.encode())
            yield Bad(f"{key}-{label}", ("train", "recipe.yaml", f"{key}=users:f"), (key, "users:f"), prepare)


CASES = [*config_cases(), *file_cases(), *data_cases(), *template_cases(), *module_cases()]
check_labels(CASES)
SLOW_LABELS = ("loops", "recurses", "large", "many-rows", "exits", "raises", "kills", "reads-stdin")  # take seconds
FAST = sample([case for case in CASES if not case.label.endswith((*SLOW_LABELS, "fifo"))], SAMPLE)
FAST += [case for case in CASES if case.label.endswith("fifo")]  # whoever opens one waits for a writer: a hang


@pytest.fixture(scope="module")
def sound(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe, a model and data with which nothing is wrong."""
    folder = tmp_path_factory.mktemp("sound")
    write_inputs(folder, demo, RECIPE)
    return folder


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Launches, which only look as if they had happened."""
    launches: list[list[str]] = []
    monkeypatch.setattr(launcher, "launch", lambda arguments, *unused: launches.append(arguments) or cli.FAILED)
    monkeypatch.delenv("HYBRID3D_CHECKED", raising=False)
    return launches


@pytest.fixture
def harness(
    sound: Path,
    tmp_path: Path,
    started: list[list[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Harness:
    shutil.copytree(sound, tmp_path / "work")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.syspath_prepend(tmp_path / "work")
    return Harness(tmp_path / "work", started, capsys, monkeypatch)


@pytest.mark.parametrize("case", FAST, ids=lambda case: case.label)
def test_sample_of_bad_files_is_refused(harness: Harness, case: Bad) -> None:
    harness.refuse(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_bad_files_are_refused(harness: Harness, case: Bad) -> None:
    harness.refuse(case)


def test_bad_file_cases_are_some_hundreds() -> None:
    assert len(CASES) > 400


@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(999)"])
@pytest.mark.processes
def test_module_that_never_loads_is_ended(harness: Harness, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """With what it has started, which would hold its pipes."""
    monkeypatch.setattr(pool_client, "START_SECONDS", 3)
    source = f"import subprocess; subprocess.Popen(['sleep', '999'])\n{source}"
    prepare = overwrite("users.py", source.encode())
    said = ("reward.name", "does not load within 3 s")
    harness.refuse(Bad("never", ("train", "recipe.yaml", "reward.name=users:f"), said, prepare))


def test_module_output_is_not_taken_for_its_answer(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    from hybrid3d.scoring.pool_client import load_in_subprocess

    work = Path(harness._work)
    (work / "chatty.py").write_text("import atexit\nprint('{')\ndef f(a, b, c):\n    return 1.0\nprint('garbage')")
    monkeypatch.chdir(work)
    assert load_in_subprocess("chatty:f", "chatty:f", "reward", "reward") == ()


def test_token_the_model_lacks_is_named_with_text_and_row(harness: Harness) -> None:
    def add(work: Path) -> None:
        def change(tokenizer: dict[str, Any]) -> None:
            token = {"id": 402, "content": "plus", "single_word": False, "lstrip": False, "rstrip": False}
            tokenizer["added_tokens"].append(token | {"normalized": False, "special": False})

        edit(work, "tokenizer.json", change)
        rows = [*["1 + 1 ="] * 3, "1 plus 1 ="]
        pq.write_table(pa.table({"question": rows, "answer": ["2"] * 4}), work / "other.parquet")

    size = json.loads((harness._work / "model" / "config.json").read_text())["vocab_size"]
    said = ("other.parquet: row 3", "'plus'", f"vocab_size is {size}", "use the tokenizer")
    message = harness.refuse(Bad("token", ("train", "recipe.yaml", "data.eval=other.parquet"), said, add))
    assert "the tokenizer makes token" in message


def test_wrong_config_value_is_not_blamed_on_the_tokenizer(harness: Harness) -> None:
    case = Bad(
        "eps", ("train", "recipe.yaml"), ("rms_norm_eps=0", "such as 1e-06"), set_in("config.json", "rms_norm_eps", 0)
    )
    assert "tokenizer" not in harness.refuse(case)


def test_unbroken_files_of_the_cases_are_not_refused(
    harness: Harness,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hybrid3d.launch import preflight

    monkeypatch.chdir(harness._work)
    monkeypatch.setattr(preflight, "check_weights", lambda *unused: None)  # which starts an engine
    assert cli.main(["train", "recipe.yaml"]) == cli.FAILED
    assert started

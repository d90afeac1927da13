"""`make demo-llm`: its questions, reward and checkpoint, the latter against the file it comes from; and a short run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from commands import ROOT, hybrid3d, python, read_rows


def script(name: str) -> ModuleType:
    """A file of recipes/ as a module, which is not run."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_demo_llm = script("make_demo_llm")
right_kind = script("right_kind")


def words_of(rows: list[dict]) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


def test_held_out_words_are_in_no_other_question() -> None:
    made = make_demo_llm.data_sets(1)
    held_out, seen = set(words_of(made["eval"])), set(words_of(made["train"]))
    assert len(held_out) == len(made["eval"]) == 4 * make_demo_llm.HELD_OUT
    assert held_out & seen == set()
    assert len(held_out | seen) == sum(len(words.split()) for words in make_demo_llm.WORDS.values())


def test_question_offers_every_kind_and_has_the_word_s_answer() -> None:
    for rows in make_demo_llm.data_sets(1).values():
        for row, word in zip(rows, words_of(rows), strict=True):
            assert word in make_demo_llm.WORDS[row["answer"]].split()
            offered = row["prompt"][0]["content"].removeprefix("Answer with one word: ").removesuffix(".")
            assert sorted(offered.replace(" or ", ", ").split(", ")) == [*right_kind.KINDS]


def test_questions_are_the_same_only_for_the_same_seed() -> None:
    assert make_demo_llm.data_sets(1) == make_demo_llm.data_sets(1)
    assert make_demo_llm.data_sets(1) != make_demo_llm.data_sets(2)


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("animal", 1.0),
        ("Animal.", 1.0),
        ("A sparrow is an animal", 1.0),
        ("tool", 0.0),
        ("an animal or a tool", 0.0),
        ("animalistic", 0.0),
        ("an animal-free diet", 0.0),
        ("", 0.0),
    ],
)
def test_reward_is_for_naming_the_right_kind_alone(answer: str, reward: float) -> None:
    assert right_kind.right_kind(answer, "animal") == reward


def test_gguf_file_that_is_missing_or_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make_demo_llm, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match=r"no-such-package is not installed: .*requirements/demo.txt"):
        make_demo_llm.gguf_file()
    monkeypatch.setattr(make_demo_llm, "PACKAGE", "pytest")
    monkeypatch.setattr(make_demo_llm, "WEIGHTS", str(tmp_path / "missing.gguf"))
    with pytest.raises(SystemExit, match="is missing"):
        make_demo_llm.gguf_file()
    (tmp_path / "other.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(make_demo_llm, "WEIGHTS", str(tmp_path / "other.gguf"))
    with pytest.raises(SystemExit, match=f"expected {make_demo_llm.SHA256}"):
        make_demo_llm.gguf_file()


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the demo's checkpoint and questions have been made."""
    work = tmp_path_factory.mktemp("demo-llm")
    (work / "recipes").symlink_to(ROOT / "recipes")
    (work / "examples").symlink_to(ROOT / "examples")
    python(work, "examples/make_demo_llm.py", "build/demo-llm", timeout=600)
    return work


@pytest.mark.slow
def test_package_itself_is_not_imported(work: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, 'examples'); import make_demo_llm; make_demo_llm.gguf_file(); "
        "sys.exit(any('smollm' in name for name in sys.modules))"
    )
    python(work, "-c", code)


@pytest.mark.slow
def test_weights_are_those_of_the_file(work: Path) -> None:
    """Against gguf's own dequantization. q and k are left out: GGUF has their rows in another order."""
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.7.attn_v.weight": "model.layers.7.self_attn.v_proj.weight",
        "blk.7.attn_output.weight": "model.layers.7.self_attn.o_proj.weight",
        "blk.29.ffn_gate.weight": "model.layers.29.mlp.gate_proj.weight",
        "blk.29.ffn_down.weight": "model.layers.29.mlp.down_proj.weight",
    }
    tensors = {tensor.name: tensor for tensor in GGUFReader(make_demo_llm.gguf_file()).tensors}
    with safe_open(work / "build/demo-llm/model/model.safetensors", "pt") as saved:
        for theirs, ours in names.items():
            wanted = torch.from_numpy(dequantize(tensors[theirs].data, tensors[theirs].tensor_type).copy())
            assert torch.equal(saved.get_tensor(ours), wanted), ours


@pytest.mark.slow
def test_converted_checkpoint_computes_what_transformers_does_from_the_file(work: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    gguf, saved = make_demo_llm.gguf_file(), work / "build/demo-llm/model"
    turns = make_demo_llm.data_sets(1)["eval"][0]["prompt"]
    tokens, logits = [], []
    for folder, options in ((gguf.parent, {"gguf_file": gguf.name}), (saved, {})):
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        tokens.append(tokenizer.encode(text, add_special_tokens=False))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
        with torch.no_grad():
            logits.append(model(torch.tensor([tokens[0]])).logits)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > 20
    assert torch.equal(logits[0], logits[1])


@pytest.mark.slow
@pytest.mark.engines
@pytest.mark.timeout(1800)
def test_short_demo_llm_trains(work: Path) -> None:
    short = ["run.steps=2", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=4", "run.eval_every=2"]
    hybrid3d(work, "train", "recipes/demo-llm.yaml", *short, timeout=1500)
    rows = read_rows(work / "runs/demo-llm")
    assert len(rows) == 3
    for row in rows:
        assert row["sync/received_bytes"] == row["sync/lower_bound_bytes"] > 400e6
        assert row["mismatch/logprob_abs_max"] <= 1e-3
    assert all(row["train/grad_norm"] > 0 for row in rows[:2])
    hybrid3d(work, "export", "runs/demo-llm", "build/demo-llm/trained")
    said = python(
        work,
        "examples/compare_answers.py",
        "build/demo-llm/model",
        "build/demo-llm/trained",
        "build/demo-llm/eval.parquet",
        timeout=600,
    )
    assert said.count("before: ") == 7
    for step, name in ((0, "before"), (2, "after")):
        (line,) = (line for line in said.splitlines() if line.strip().startswith(f"{name}:") and "right one" in line)
        assert f", {rows[step]['eval/accuracy']:.0%} name the right one" in line

"""Chats as templates render them: with thinking blocks, last turns of the assistant, keys that are null.

The templates have the constructs of the published ones that they are named after.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid3d.config import Recipe, RecipeError, load_recipe, recipe_to_yaml
from hybrid3d.generation.agents.history import History
from hybrid3d.inputs.models import read_data, read_tokenizer
from hybrid3d.rl.chats import InvalidRow, encode_answer
from hybrid3d.rl.data import DataError, PromptData, encode_chat, encode_prompt

QWEN = (  # Qwen 2.5
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN_3_5 = (  # which opens a block to think in, and writes an empty one into history
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% set said = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set thought = '' %}{% if '</think>' in said %}"
    "{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ said }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
R1 = (  # R1-Distill and DeepSeek-V3.1: history has no block, and no thoughts
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}<|User|>{{ m['content'] }}"
    "{% elif m['content'] is not none %}<|Assistant|>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA_3 = (  # and Llama 3.1 and DeepSeek-V3, which break where a key is there and null
    "{{ bos_token }}{% for m in messages %}{% if 'tool_calls' in m %}{{ m['tool_calls'][0]['function']['name'] }}"
    "{% endif %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
GEMMA = QWEN.replace("<|im_start|>", "<start_of_turn>").replace("<|im_end|>", "<end_of_turn>")
V3_1 = R1.replace("<think>\n", "<think>")
REAL_LLAMA_3 = LLAMA_3.replace("<|im_start|>", "<|start_header_id|>").replace("<|im_end|>", "<|eot_id|>")
SPECIAL = [
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|User|>",
    "<|Assistant|>",
    "<start_of_turn>",
    "<end_of_turn>",
]


def make_tokenizer(template: str, eos: str = "<|im_end|>") -> Any:
    """Return a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token=eos, pad_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def texts(tokenizer: Any, prompt: Any, answer: str) -> tuple[str, str]:
    """Return the texts of the tokens of a prompt and an answer."""
    ids, told = encode_answer(tokenizer, prompt, answer)
    return tokenizer.decode(ids), tokenizer.decode(told)


def rendered(tokenizer: Any, answer: str) -> str:
    turns = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": answer}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False))


@pytest.mark.parametrize(
    ("template", "eos", "answer", "front"),
    [
        (QWEN, "<|im_end|>", "5", "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"),
        (QWEN_3_5, "<|im_end|>", "5", "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n<think>\n"),
        (QWEN_3_5, "<|im_end|>", "<think>\nadd\n</think>\n\n5", "<|im_start|>assistant\n<think>\n"),
        (QWEN_3_5, "<|im_end|>", "add\n</think>\n\n5", "<|im_start|>assistant\n<think>\n"),
        (R1, "</s>", "5", "<s><|User|>2+3?<|Assistant|>"),
        (LLAMA_2, "</s>", "5", "<s>[INST] 2+3? [/INST]"),
        (LLAMA_3, "<|im_end|>", "5", "<|im_start|>assistant\n\n"),
        (GEMMA, "</s>", "5", "<start_of_turn>assistant\n"),
    ],
)
def test_trained_text_is_what_the_template_renders(template: str, eos: str, answer: str, front: str) -> None:
    tokenizer = make_tokenizer(template, eos)
    prompt, told = texts(tokenizer, "2+3?", answer)
    assert prompt.endswith(front)
    assert prompt + told == rendered(tokenizer, answer).removesuffix("\n")  # up to the end token


def test_answer_ends_once() -> None:
    assert texts(make_tokenizer(QWEN), "2+3?", "5")[1] == "5<|im_end|>"
    assert texts(make_tokenizer(LLAMA_2, "</s>"), "2+3?", "5")[1] == " 5 </s>"
    endless = QWEN.replace("<|im_end|>\n{% endfor", "\n{% endfor")
    assert texts(make_tokenizer(endless, "</s>"), "2+3?", "5")[1] == "5</s>"


def test_answer_that_closes_the_block_goes_on_in_it() -> None:
    """R1's template drops thoughts, as they are no history; the policy writes them after the prompt that opens them."""
    tokenizer = make_tokenizer(R1, "</s>")
    prompt, told = texts(tokenizer, "2+3?", "add\n</think>\n\n5")
    assert prompt == tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3?"}], tokenize=False, add_generation_prompt=True
    )
    assert told == "add\n</think>\n\n5</s>"


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (R1.replace("<think>\n", ""), "add</think>5"),  # nothing has opened the block: the thoughts would be lost
        (QWEN.replace("assistant\n{% endif", "model\n{% endif"), "5"),  # asks for another role's turn
        (QWEN.replace("{{ m['content'] }}", "{{ m['content'] if m['role'] == 'user' else '' }}"), "5"),
    ],
)
def test_answer_that_the_template_renders_otherwise_is_refused(template: str, answer: str) -> None:
    tokenizer = make_tokenizer(template)
    with pytest.raises(InvalidRow, match="asks for an answer in another way than it renders one") as refused:
        encode_answer(tokenizer, "2+3?", answer)
    assert repr(rendered(tokenizer, answer)[-20:])[1:-1] in str(refused.value)


SHORT = ("d", "e", "end", "s", "n", "think", " 42 ", "\n42")


@pytest.mark.parametrize("answer", SHORT)
@pytest.mark.parametrize(
    ("template", "eos", "end"),
    [
        (QWEN, "<|im_end|>", "<|im_end|>"),
        (QWEN_3_5, "<|im_end|>", "<|im_end|>"),
        (R1, "</s>", "</s>"),
        (V3_1, "</s>", "</s>"),
        (LLAMA_2, "</s>", "</s>"),
        (REAL_LLAMA_3, "<|eot_id|>", "<|eot_id|>"),
        (GEMMA, "</s>", "<end_of_turn>"),
    ],
)
def test_answer_that_is_within_the_end_token(template: str, eos: str, end: str, answer: str) -> None:
    tokenizer = make_tokenizer(template, eos)
    prompt, told = texts(tokenizer, "2+3?", answer)
    assert prompt + told == rendered(tokenizer, answer).removesuffix("\n")
    assert told.count(end) == 1
    text = told.removesuffix(end)
    assert text.strip() == answer.strip() or template == QWEN_3_5
    if template in (QWEN, R1, V3_1):  # which write answers as they are
        assert text == answer


@pytest.mark.parametrize(("template", "answer"), [(R1, "dd"), (R1, "User"), (R1, "2+3?"), (V3_1, "s"), (QWEN, "user")])
def test_answer_that_is_within_the_prompt(template: str, answer: str) -> None:
    tokenizer = make_tokenizer(template, "</s>" if template != QWEN else "<|im_end|>")
    end = tokenizer.eos_token
    assert texts(tokenizer, "2+3?", answer)[1] == answer + end
    dropped = template.replace("m['content'].split('</think>')[-1]", "''").replace(
        "{{ m['content'] }}", "{{ m['content'] if m['role'] == 'user' else '' }}"
    )
    tokenizer.chat_template = dropped
    with pytest.raises(InvalidRow, match="asks for an answer in another way than it renders one"):
        encode_answer(tokenizer, "2+3?", answer)


@pytest.mark.parametrize("template", [R1, V3_1])
@pytest.mark.parametrize("front", ["<think>\n", "\n<think>\n", "<think>", ""])
def test_trace_opens_its_block_once(template: str, front: str) -> None:
    tokenizer = make_tokenizer(template, "</s>")
    prompt, told = texts(tokenizer, "2+3?", f"{front}let me\n</think>\n\n42")
    assert prompt == tokenizer.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True)
    assert told == "let me\n</think>\n\n42</s>"


PHI_3 = (  # which ends the whole text with EOS, that no answer ends with
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)


def test_answer_ends_with_the_first_of_the_models_end_tokens(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PHI_3, "</s>")
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    for ends, told in (([end, eos], "42<|im_end|>"), ([eos], "42<|im_end|>\n</s>"), ([], "42<|im_end|>\n</s>")):
        assert tokenizer.decode(encode_answer(tokenizer, "2+3?", "42", ends)[1]) == told
    path = write(tmp_path / "data.parquet", q=["2+3?"], a=["5"], bad=["6"])
    how: Any = dict(prompt="q", max_prompt_tokens=99, chat_template=True, end_tokens=[eos, end])
    data = PromptData.read(path, tokenizer, answer="a", max_tokens=99, **how)
    assert tokenizer.decode(data.examples[0].answer_ids) == "5<|im_end|>"
    pairs = PromptData.read(path, tokenizer, answer="a", rejected="bad", max_tokens=99, **how)
    assert tokenizer.decode(pairs.examples[0].rejected_ids).endswith("6<|im_end|>")


def test_run_takes_end_tokens_from_the_checkpoint(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(PHI_3, "</s>")
    tokenizer.save_pretrained(tmp_path / "model")
    end, eos = tokenizer.convert_tokens_to_ids(["<|im_end|>", "</s>"])
    (tmp_path / "model/generation_config.json").write_text(json.dumps({"eos_token_id": [eos, end]}))
    path = write(tmp_path / "data.parquet", question=["2+3?"], answer=["5"])
    settings = [f"model.path={tmp_path / 'model'}", f"data.train={path}", f"data.eval={path}"]
    recipe = load_recipe(Path(__file__).parents[2] / "recipes/demo-warmup.yaml", [*settings, "data.chat_template=true"])
    config = {"max_position_embeddings": 200, "vocab_size": len(tokenizer)}
    train, _ = read_data(recipe, config, read_tokenizer(recipe))
    assert tokenizer.decode(train.examples[0].answer_ids) == "5<|im_end|>"


def test_thoughts_without_an_answer_end_once() -> None:
    assert texts(make_tokenizer(QWEN_3_5), "2+3?", "<think>\nadd\n</think>")[1] == "add\n</think>\n\n<|im_end|>"
    assert texts(make_tokenizer(QWEN), "2+3?", "<think>\nadd\n</think>")[1] == "<think>\nadd\n</think><|im_end|>"
    assert texts(make_tokenizer(R1, "</s>"), "2+3?", "<think>\nadd\n</think>")[1] == "add\n</think></s>"


def test_added_tokens_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, reads = make_tokenizer(QWEN), []
    kind = type(tokenizer)
    own = kind.added_tokens_decoder.fget
    monkeypatch.setattr(kind, "added_tokens_decoder", property(lambda self: reads.append(self) or own(self)))
    for _ in range(20):
        encode_answer(tokenizer, "2+3?", "5")
    assert len([one for one in reads if one is tokenizer]) <= 1


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def test_sft_and_dpo_read_them(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(R1, "</s>")
    path = write(tmp_path / "data.parquet", q=["2+3?"], a=["5"], bad=["6"])
    data = PromptData.read(
        path, tokenizer, prompt="q", answer="a", max_prompt_tokens=99, chat_template=True, max_tokens=99
    )
    assert tokenizer.decode(data.examples[0].prompt_ids) == "<s><|User|>2+3?<|Assistant|>"
    assert tokenizer.decode(data.examples[0].answer_ids) == "5</s>"
    asked = PromptData.read(path, tokenizer, prompt="q", answer="a", max_prompt_tokens=99, chat_template=True)
    assert tokenizer.decode(asked.examples[0].prompt_ids) == "<s><|User|>2+3?<|Assistant|><think>\n"
    columns = {"prompt": "q", "answer": "a", "rejected": "bad"}
    pairs = PromptData.read(
        path, tokenizer, **columns, max_prompt_tokens=99, max_tokens=99, chat_template=True
    ).examples
    assert tokenizer.decode(pairs[0].trained[0]) == "<s><|User|>2+3?<|Assistant|>5</s>"
    assert tokenizer.decode(pairs[0].rejected_ids) == "6</s>"


TALK = [{"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}]


def test_prompt_that_has_the_answer_is_refused(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(QWEN)
    with pytest.raises(InvalidRow, match="the prompt ends with a turn of the assistant"):
        encode_chat(tokenizer, TALK)
    path = write(tmp_path / "data.parquet", q=[TALK], a=["5"])
    with pytest.raises(DataError, match=r"row 0 \(from 0\): the prompt ends with a turn of the assistant"):
        PromptData.read(path, tokenizer, prompt="q", answer="a", max_prompt_tokens=99, chat_template=True)


def test_keys_that_arrow_and_clients_add_are_not_there(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(LLAMA_3)
    calls = [{"function": {"name": "add"}}]
    rows = [[TALK[0]], [TALK[0], {**TALK[1], "tool_calls": calls}, {"role": "user", "content": "sure?"}]]
    path = write(tmp_path / "data.parquet", q=rows, a=["5", "5"])  # a struct has the key in each turn
    data = PromptData.read(path, tokenizer, prompt="q", answer="a", max_prompt_tokens=99, chat_template=True)
    for example, turns in zip(data.examples, rows, strict=True):
        expected = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(example.prompt_ids) == expected
    sent = ({"role": "user", "content": "2+3?", "tool_calls": None, "name": None},)
    assert History(tokenizer, tokenizer).render(sent) == tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+3?"}], tokenize=False, add_generation_prompt=True
    )


def test_column_that_is_rendered_already_has_one_bos() -> None:
    from tokenizers import processors

    tokenizer = make_tokenizer(R1, "</s>")
    begins = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = begins
    text = tokenizer.apply_chat_template([TALK[0]], tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text).count(tokenizer.bos_token_id) == 2
    assert tokenizer.decode(encode_prompt(tokenizer, text)) == text
    assert tokenizer.decode(encode_prompt(tokenizer, "2+3?")) == "<s>2+3?"


LLAMA_3_2 = "{{ 'Today Date: ' + strftime_now('%d %b %Y') }}" + QWEN


def test_run_has_one_date(tmp_path: Path) -> None:
    make_tokenizer(LLAMA_3_2).save_pretrained(tmp_path / "model")
    recipe = load_recipe(
        Path(__file__).parents[2] / "recipes/demo-cpu.yaml",
        [f"model.path={tmp_path / 'model'}", "data.chat_template=true"],
    )
    for day, written in (("2024-07-26", "26 Jul 2024"), ("2031-01-02", "02 Jan 2031")):
        dated = replace(recipe, data=replace(recipe.data, date=day))
        tokenizer = read_tokenizer(dated)
        for one in (tokenizer, copy.deepcopy(tokenizer)):
            assert one.decode(encode_chat(one, "2+3?")).startswith(f"Today Date: {written}<|im_start|>user")
            assert (
                History(one, one).render(({"role": "user", "content": "2+3?"},)).startswith(f"Today Date: {written}<")
            )
        assert load_recipe_text(recipe_to_yaml(dated), tmp_path).data.date == day
    assert recipe.data.date == "2024-07-26"


def load_recipe_text(text: str, folder: Path) -> Recipe:
    (folder / "recipe.yaml").write_text(text)
    return load_recipe(folder / "recipe.yaml")


def test_date_that_is_none_is_refused() -> None:
    for day in ("2024-02-30", "26 Jul 2024", "20240726"):
        with pytest.raises(RecipeError, match=r"data\.date: expected a string, a day as '2024-07-26'"):
            load_recipe(
                Path(__file__).parents[2] / "recipes/demo-cpu.yaml", ["data.chat_template=true", f"data.date='{day}'"]
            )

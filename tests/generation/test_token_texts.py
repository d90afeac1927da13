"""Parts of texts are encoded and decoded as the tokenizer does within a whole text, whatever its kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mistral_common
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hybrid3d.config import RecipeError, load_recipe
from hybrid3d.generation.agents.history import Call, CallResult, History, PromptText
from hybrid3d.generation.agents.requests import _logprobs, split_bytes
from hybrid3d.generation.agents.sessions import SessionPool
from hybrid3d.generation.engine import Completion, Sampling
from hybrid3d.generation.stops import Stops, check_stops, ends_with_stop, find_stops, pause_tokens
from hybrid3d.generation.turns import Trajectory, Turns
from hybrid3d.rl.data import Example, PromptData
from hybrid3d.rl.token_texts import TokenTexts, decode_part, encode_part
from hybrid3d.scoring.environments import Reply

MODEL = (
    Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
)  # of Mistral 7B, published with vLLM's needs
CONFIG = {
    "tokenizer_class": "LlamaTokenizer",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "legacy": False,
}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
DECODER = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    STRIP,
]
PREPEND = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]


def metaspace(scheme: str) -> dict[str, Any]:
    pre_tokenizer = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
    return {"normalizer": None, "pre_tokenizer": pre_tokenizer}


# As in the tokenizer.json of Llama 2, of TinyLlama and Mixtral, and of what older converters wrote
FORMS = {
    "prepend": {"normalizer": {"type": "Sequence", "normalizers": PREPEND}, "pre_tokenizer": None},
    "first": metaspace("first"),
    "always": metaspace("always"),
}
BYTES = {  # byte-level BPE: of GPT-2; with a blank in front; that composes characters, as Qwen's; without capitals
    "bytes": (None, False),
    "bytes with a blank": (None, True),
    "nfc": (normalizers.NFC(), False),
    "lower case": (normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]), False),
}


@pytest.fixture(scope="module")
def reference() -> SentencePieceProcessor:
    return SentencePieceProcessor(model_file=str(MODEL))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("mistral")
    (folder / "tokenizer.model").write_bytes(MODEL.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    core = json.loads(AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str())
    decoder = {"decoder": {"type": "Sequence", "decoders": DECODER}}
    special = {key: CONFIG[key] for key in ("bos_token", "eos_token", "unk_token")}
    return {
        name: PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core | form | decoder)), **special)
        for name, form in FORMS.items()
    }


@pytest.fixture(scope="module")
def byte_level() -> dict[str, Any]:
    return {name: make_byte_level(*how) for name, how in BYTES.items()}


def make_byte_level(normalizer: Any, add_prefix_space: bool) -> Any:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizer
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    core.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ("<|end|>", "<|im_start|>", "<|im_end|>")]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["She sold 48 clips in May\n\nand 24 in June, 48+24=72 in all"] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", clean_up_tokenization_spaces=True)


TEXTS = [
    "24>>",
    " clips in May",
    "The answer",
    "\nObservation: 5\n",
    "\n\nno",
    "=x",
    "été",
    "日本 が",
    "a , b .",
    "don 't",
]
FRONTS = ["She sold <<48/2=", "hello", "<|user|>\nAre you there?\n", "no end,", "7"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_encodes_a_part_as_within_the_whole(
    form: str, text: str, sentencepiece: dict[str, Any], reference: SentencePieceProcessor
) -> None:
    tokenizer, compared = sentencepiece[form], 0
    for front in FRONTS:
        before, whole = reference.encode(front), reference.encode(front + text)
        tokens = encode_part(tokenizer, text, before)
        assert decode_part(tokenizer, tokens, before) == text
        if whole[: len(before)] == before:  # otherwise no token ends there in the whole
            assert tokens == whole[len(before) :]
            compared += 1
    assert compared or text == "=x"


@pytest.mark.parametrize("form", FORMS)
def test_encode_part_after_special_token_matches_the_whole_text(form: str, sentencepiece: dict[str, Any]) -> None:
    """The converters' forms differ there; the model has been trained with what its own gives."""
    tokenizer = sentencepiece[form]
    for text in (" [INST] sure? [/INST]", "hm", "</s>x"):
        whole = tokenizer.encode(f"a b</s>{text}", add_special_tokens=False)
        cut = whole.index(tokenizer.eos_token_id) + 1
        assert encode_part(tokenizer, text, whole[:cut]) == whole[cut:]


@pytest.mark.parametrize("form", BYTES)
def test_byte_level_adds_and_loses_nothing(form: str, byte_level: dict[str, Any]) -> None:
    tokenizer = byte_level[form]
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    core["pre_tokenizer"]["add_prefix_space"] = False
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)))
    for front in FRONTS:
        before = tokenizer.encode(front, add_special_tokens=False)
        for text in TEXTS:
            tokens = encode_part(tokenizer, text, before)
            assert tokens == plain.encode(text, add_special_tokens=False)
            normalizer = BYTES[form][0]
            assert decode_part(tokenizer, tokens, before) == (normalizer.normalize_str(text) if normalizer else text)


def vllm_text(tokenizer: Any, prompt: Sequence[int], tokens: Sequence[int]) -> str:
    """Return the text that vLLM's detokenizer makes of an answer, token by token."""
    from vllm import SamplingParams
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    request: Any = SimpleNamespace(sampling_params=SamplingParams(), prompt_token_ids=list(prompt), request_id="0")
    detokenizer = FastIncrementalDetokenizer(tokenizer, request)
    for token in tokens:
        detokenizer.update([token], False)
    return detokenizer.output_text


@pytest.mark.engines
def test_texts_are_those_of_vllm(sentencepiece: dict[str, Any], byte_level: dict[str, Any]) -> None:
    for name, tokenizer in {**sentencepiece, **byte_level}.items():
        for front in FRONTS:
            prompt = tokenizer.encode(front)
            for text in [" It is 5.", *TEXTS]:
                for tokens in (tokenizer.encode(text, add_special_tokens=False), encode_part(tokenizer, text, prompt)):
                    tokens = [*tokens, tokenizer.eos_token_id]
                    assert decode_part(tokenizer, tokens, prompt) == vllm_text(tokenizer, prompt, tokens), (name, text)


def test_parts_of_an_answer_join_to_its_text(sentencepiece: dict[str, Any], byte_level: dict[str, Any]) -> None:
    for tokenizer in (*sentencepiece.values(), *byte_level.values()):
        prompt = tokenizer.encode("How many? ", add_special_tokens=False)
        tokens = encode_part(tokenizer, " she sold 24 , clips\n in may", prompt)
        for cut in range(len(tokens) + 1):
            first, rest = tokens[:cut], tokens[cut:]
            texts = decode_part(tokenizer, first, prompt), decode_part(tokenizer, rest, [*prompt, *first])
            assert "".join(texts) == " she sold 24 , clips\n in may"


def make_turns(tokenizer: Any, environment: Sequence[str] = (), ends: Sequence[str] = ()) -> Turns:
    turns = Turns.__new__(Turns)  # without the processes of an environment
    turns._tokenizer, turns._end_token, turns._end_tokens = tokenizer, tokenizer.eos_token_id, {tokenizer.eos_token_id}
    turns._stops, turns._ends = find_stops(tokenizer, environment), find_stops(tokenizer, ends)
    turns._stop_tokens = pause_tokens(TokenTexts(tokenizer), turns._stops)
    turns._max_new_tokens, turns._max_replies = 99, 8
    return turns


@pytest.mark.parametrize("form", FORMS)
def test_environment_reads_and_writes_as_in_one_text(
    form: str, sentencepiece: dict[str, Any], reference: SentencePieceProcessor
) -> None:
    tokenizer, written = sentencepiece[form], "She sold <<48/2="
    turns, answer = make_turns(tokenizer, ("=",)), Trajectory(Example(0, "q", "24", (1,)), None)
    answer.append_completion(Completion(tuple(reference.encode(written)), (), 0))
    assert turns._has_ended_turn(answer)
    turns.go_on(answer, Reply("24>>"))
    assert answer.tokens == reference.encode(f"{written}24>>")
    answer.append_completion(Completion(tuple(reference.encode("x clips in May")[1:]), (), 0))
    assert turns._turn(answer) == " clips in May"
    assert "".join([*answer.turns, turns._turn(answer)]) == f"{written}24>> clips in May"


@pytest.mark.parametrize("form", FORMS)
def test_answer_of_sft_begins_without_a_blank(
    form: str, sentencepiece: dict[str, Any], reference: SentencePieceProcessor, tmp_path: Path
) -> None:
    tokenizer, prompt = sentencepiece[form], "<|user|>\nAre you there?\n<|assistant|>\n"
    pq.write_table(pa.table({"q": [prompt], "a": ["The answer"]}), tmp_path / "data.parquet")
    data = PromptData.read(
        tmp_path / "data.parquet", tokenizer, prompt="q", answer="a", max_prompt_tokens=99, max_tokens=99
    )
    (tokens,) = data.examples[0].trained
    assert list(tokens) == [*reference.encode(f"{prompt}The answer"), tokenizer.eos_token_id]
    assert len(data.examples[0].prompt_ids) == len(reference.encode(prompt))


MIXTRAL = (  # whose template writes a blank before a reply
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ ' [INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strips", [False, True])
def test_chat_of_an_agent_stays_in_its_branch(form: str, strips: bool, sentencepiece: dict[str, Any]) -> None:
    tokenizer = sentencepiece[form]
    tokenizer.chat_template = MIXTRAL
    of, messages, text = History(tokenizer, tokenizer), ({"role": "user", "content": "2+3?"},), ""
    for said in (" It is 5.", " Yes. "):
        prompt = PromptText(of.render(messages), messages)
        branch = of.begin(prompt, of.plan(prompt))
        reply = [*encode_part(tokenizer, said, branch.context), tokenizer.eos_token_id]
        text = decode_part(tokenizer, reply, branch.context)
        assert text == said
        branch.append_generated(Completion(tuple(reply), (), 0))
        of.finish(branch, prompt, text.strip() if strips else text, cut=False)
        messages += (
            {"role": "assistant", "content": text.strip() if strips else text},
            {"role": "user", "content": "?"},
        )
    assert len(of.branches) == 1
    tokens, asked = of.branches[0].tokens, tokenizer.encode("</s> [INST] ? [/INST]", add_special_tokens=False)
    said = [encode_part(tokenizer, text, [5]) for text in (" It is 5.", " Yes. ")]
    assert tokens == [*said[0], *asked, *said[1], tokenizer.eos_token_id]


# --- stops ----------------------------------------------------------------------------------------------------------


def test_special_token_is_a_stop_by_its_id(byte_level: dict[str, Any]) -> None:
    tokenizer = byte_level["bytes"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert find_stops(tokenizer, ["<|im_end|>"]) == Stops((), frozenset({end}))
    both = find_stops(tokenizer, ["<|im_end|>", "="])
    assert (both.texts, both.ids) == (("=",), {end})
    with_text = {token for token in range(len(tokenizer)) if "=" in tokenizer.decode([token])}
    assert pause_tokens(TokenTexts(tokenizer), both) == {end, *with_text}


class Letters:
    """A vocabulary of these texts."""

    def __init__(self, *texts: str):
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return []

    def decode(self, token_ids: list[int], **settings: bool) -> str:
        return "".join(self.texts[token] for token in token_ids)


def test_generating_pauses_at_every_token_that_can_end_a_stop() -> None:
    texts = TokenTexts(Letters("", "a", "=", " =", "==", "</", "tool", ">", "=>"))
    assert pause_tokens(texts, Stops(("=",))) == {2, 3, 4, 8}
    assert pause_tokens(texts, Stops(("=", "</tool>"))) == {2, 3, 4, 7, 8}
    assert pause_tokens(texts, Stops()) == set()
    with pytest.raises(ValueError, match=r"stop '\?!': none of the tokenizer's 9 tokens has '!' in it"):
        pause_tokens(texts, Stops(("?!",)))


@pytest.mark.parametrize(
    ("text", "last", "there"),
    [
        ("1+1=", "=", True),
        ("1=1", "1", False),
        ("1=", " =", True),
        ("a </tool>", ">", True),
        ("a </tool> b>", "b>", False),
        ("a </tool>", "ool>", True),
        ("a >", ">", False),
    ],
)
def test_whether_a_stop_ends_in_the_last_token(text: str, last: str, there: bool) -> None:
    assert ends_with_stop(text, last, ["=", "</tool>"]) is there


@pytest.mark.parametrize(
    ("form", "stop", "why"),
    [
        ("bytes", "<|im_end|>\n", "contains the special token '<|im_end|>', which is not in decoded text"),
        ("lower case", "END", "the tokenizer writes it 'end'"),
        ("nfc", "re\u0301sume\u0301", "the tokenizer writes it 'résumé'"),
    ],
)
def test_stop_that_is_never_in_the_text_is_refused(form: str, stop: str, why: str, byte_level: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^stop ") as refused:
        find_stops(byte_level[form], [stop])
    assert why in str(refused.value)


def test_special_stop_ends_an_answer_and_a_turn(byte_level: dict[str, Any]) -> None:
    tokenizer = byte_level["bytes"]
    end, text = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.encode("She sold 48")
    answer = Trajectory(Example(0, "q", "", (5,)), 1)
    turns = make_turns(tokenizer, ends=["<|im_end|>"])
    request = turns.request(answer, Sampling(stop=("<|im_end|>",)))
    assert end in request.stop_tokens
    assert request.sampling.stop == ()
    turns.append(answer, Completion((*text, end), (), 0))
    assert answer.stopped
    assert answer.tokens == [*text, end]
    talking = make_turns(tokenizer, environment=["<|im_end|>"])
    answer = Trajectory(Example(0, "q", "", (5,)), 1)
    assert end in talking.request(answer, Sampling()).stop_tokens
    talking.append(answer, Completion((*text, end), (), 0))
    assert talking._has_ended_turn(answer)
    talking.go_on(answer, Reply("go on"))
    assert not answer.done


def test_stops_with_a_blank_at_their_end_pause_at_it(sentencepiece: dict[str, Any]) -> None:
    """A token decoded by itself loses its blank."""
    tokenizer = sentencepiece["first"]
    texts = TokenTexts(tokenizer)
    clips = tokenizer.convert_tokens_to_ids("▁answer")
    assert texts.decode([clips]) == " answer"
    assert clips in pause_tokens(TokenTexts(tokenizer), find_stops(tokenizer, ["Observation: "]))
    last = tokenizer.encode("。", add_special_tokens=False)[-1]
    assert last in pause_tokens(TokenTexts(tokenizer), find_stops(tokenizer, ["。"]))


SPLIT = ["é 😀 7", "日本語が好き。", "naïve — “quotes” 1→2", "👩‍👩‍👧 end", "\N{OGHAM SPACE MARK}x", "plain"]


def texts_of_vllm(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Return the texts that vLLM's server has for tokens: a character is all its last token's."""
    from vllm.v1.engine.logprobs import LogprobsProcessor

    processor = object.__new__(LogprobsProcessor)
    processor.tokenizer = tokenizer
    texts = [tokenizer.decode([token]) for token in tokens]
    return [
        processor._correct_decoded_token(token, list(tokens[max(0, place - 4) : place]))
        if text.endswith("\ufffd")
        else text
        for place, (token, text) in enumerate(zip(tokens, texts, strict=True))
    ]


@pytest.mark.parametrize("text", SPLIT)
@pytest.mark.parametrize("kind", [*FORMS, "bytes", "bytes with a blank"])
def test_bytes_of_tokens_are_those_of_the_text(
    kind: str, text: str, sentencepiece: dict[str, Any], byte_level: dict[str, Any]
) -> None:
    """They are what OpenAI's API has them for."""
    tokenizer = {**sentencepiece, **byte_level}[kind]
    before = tokenizer.encode("so: ", add_special_tokens=False)
    tokens = encode_part(tokenizer, text, before)
    parts = list(split_bytes(tokenizer, tokens, before))
    assert b"".join(part.bytes for part in parts) == text.encode()
    for part in parts:
        if part.text is not None:
            assert text[part.offset : part.offset + len(part.text)] == part.text
            assert part.name == part.text
        else:
            assert part.name == "".join(f"\\x{byte:02x}" for byte in part.bytes)
    assert [part.offset for part in parts] == sorted(part.offset for part in parts)


@pytest.mark.engines
@pytest.mark.parametrize("text", SPLIT)
def test_token_texts_with_whole_characters_match_vllms_server(text: str, byte_level: dict[str, Any]) -> None:
    tokenizer, done = byte_level["bytes"], 0
    tokens = tokenizer.encode(text, add_special_tokens=False)
    for part, theirs in zip(split_bytes(tokenizer, tokens, ()), texts_of_vllm(tokenizer, tokens), strict=True):
        done += len(theirs)
        assert theirs in ("", part.text) or (part.text is None and text[:done].endswith(theirs))
        assert part.offset <= done


def test_bytes_of_what_is_no_text_are_the_tokens_own(byte_level: dict[str, Any]) -> None:
    tokenizer = byte_level["bytes"]
    whole = tokenizer.encode("😀7", add_special_tokens=False)
    for tokens in (whole[:2], [whole[0], whole[-1]], [whole[1], whole[1]], [tokenizer.eos_token_id, *whole]):
        parts = list(split_bytes(tokenizer, tokens, ()))
        assert len(parts) == len(tokens)
        assert b"".join(part.bytes for part in parts).decode("utf-8", "replace") == tokenizer.decode(
            tokens, skip_special_tokens=True
        )
    assert parts[0].name == "<|end|>"


def test_log_probabilities_in_openais_form(byte_level: dict[str, Any]) -> None:
    tokenizer, text = byte_level["bytes"], "é 😀 7"
    tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
    result = CallResult((1,), tokens, (-1.0,) * len(tokens), text, "stop")
    chat = _logprobs(SimpleNamespace(logprobs=True, is_chat=True), result, tokenizer)
    assert bytes(byte for token in chat["content"] for byte in token["bytes"]) == text.encode()
    assert chat["content"][0] == {"token": "\\xc3", "logprob": -1.0, "bytes": [0xC3], "top_logprobs": []}
    completion = _logprobs(SimpleNamespace(logprobs=True, is_chat=False), result, tokenizer)
    assert completion["tokens"][0] == "bytes:\\xc3"
    assert completion["text_offset"][-1] == len(text) - 1


def test_stops_of_a_recipe_that_have_no_effect_are_refused(byte_level: dict[str, Any]) -> None:
    recipe = Path(__file__).parents[2] / "recipes/demo-cpu.yaml"
    check_stops(
        load_recipe(recipe, ["rollout.stop=['<|im_end|>', x]", "rollout.environment=calculator"]), byte_level["bytes"]
    )
    for settings, message in (
        (["rollout.stop=['<|im_end|>x']"], "rollout.stop: stop '<|im_end|>x' contains the special token"),
        (["rollout.stop=['=']", "rollout.environment=calculator"], "its stop '=' ends the answer by rollout.stop='='"),
    ):
        with pytest.raises(RecipeError) as refused:
            check_stops(load_recipe(recipe, settings), byte_level["bytes"])
        assert message in str(refused.value)


def test_agents_stop_that_is_a_special_token_ends_its_reply(byte_level: dict[str, Any]) -> None:
    tokenizer = byte_level["bytes"]
    end, said = tokenizer.convert_tokens_to_ids("<|im_end|>"), tokenizer.encode("She sold 48")
    rollout = load_recipe(Path(__file__).parents[2] / "recipes/demo-cpu.yaml", ["rollout.agents={port: 9000}"]).rollout
    assert rollout is not None
    pool = SessionPool(tokenizer, rollout, [tokenizer.eos_token_id])
    pool.serve([pool.open(Example(0, "q", "a", (5,)), 1, 0)], Sampling())
    session = pool.take().result(1)
    call = Call(PromptText("How many?"), stops=("<|im_end|>",))
    result = pool.begin(session.id, call)
    ((number, request),) = pool.follow({}, False).requests.items()
    assert end in request.stop_tokens
    pool.follow({number: Completion((*said, end), (), 0)}, False)
    assert (result.result(1).text, result.result(1).finish_reason) == ("She sold 48", "stop")


def test_agents_further_stops_do_not_decode_the_vocabulary_again(
    byte_level: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile the endpoint reads no other agent's call."""
    tokenizer, decoded = byte_level["bytes"], list[Any]()
    rollout = load_recipe(Path(__file__).parents[2] / "recipes/demo-cpu.yaml", ["rollout.agents={port: 9000}"]).rollout
    assert rollout is not None
    pool = SessionPool(tokenizer, rollout, [tokenizer.eos_token_id])
    pool.serve([pool.open(Example(0, "q", "a", (5,)), 1, 0)], Sampling())
    session, decode = pool.take().result(1), type(tokenizer).decode
    pool.begin(session.id, Call(PromptText("How many?"), stops=("=",)))
    monkeypatch.setattr(type(tokenizer), "decode", lambda *given, **more: decoded.append(1) or decode(*given, **more))
    for number in range(5):
        pool.begin(session.id, Call(PromptText("How many?"), stops=(f"{number} =",)))
    assert len(decoded) < len(tokenizer) / 2

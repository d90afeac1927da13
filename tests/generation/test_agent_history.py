"""What an agent's call goes on with: generated tokens stay as they are, whatever text comes back."""

from __future__ import annotations

import random
import runpy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from commands import ROOT
from hybrid3d.generation.agents.history import (
    Branch,
    CallPrompt,
    History,
    NoChatTemplate,
    PromptText,
    PromptTokens,
    RefusedCall,
)
from hybrid3d.generation.agents.requests import read_request
from hybrid3d.generation.engine import Completion, Sampling

# As those of Qwen 2, which write contents as they are; of Llama 3, which strip them; and of Qwen 3, which drop what was
# thought before the last question
PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>\n{% endfor %}"
STRIPS = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}<eos>\n{% endfor %}"
FORGETS = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{{ m['content'] if loop.last else m['content'].split('|')[-1] }}<eos>\n{% endfor %}"
)
REPLY_FOLLOWS = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "make_demo.py"))["make_tokenizer"]()


def begin(of: History, prompt: CallPrompt) -> Branch:
    return of.begin(prompt, of.plan(prompt))


def history(tokenizer: Any, template: str | None = None) -> History:
    tokenizer.chat_template = None if template is None else template + REPLY_FOLLOWS
    return History(tokenizer, tokenizer)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    """Return a reply as OpenAI's client gives it back."""
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": None}


def chat(of: History, *messages: dict[str, Any]) -> PromptText:
    return PromptText(of.render(messages), messages)


def reply(of: History, tokenizer: Any, branch: Branch, prompt: PromptText | PromptTokens, ids: Sequence[int]) -> str:
    """Let the policy reply with these tokens; return the text that the agent receives."""
    branch.append_generated(Completion(tuple(ids), tuple(-0.5 for _ in ids), 0))
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    of.finish(branch, prompt, text, cut=False)
    return str(text)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("template", [PLAIN, STRIPS])
def test_repeated_history_continues_its_tokens(tokenizer: Any, template: str) -> None:
    of = history(tokenizer, template)
    first = chat(of, user("12+13?"))
    branch = begin(of, first)
    generated = [*ids_of(tokenizer, " 2"), *ids_of(tokenizer, "5 "), tokenizer.eos_token_id]
    text = reply(of, tokenizer, branch, first, generated)
    second = begin(of, chat(of, user("12+13?"), assistant(text), user("sure?")))
    assert second is branch
    assert branch.tokens[: len(generated)] == generated
    assert tokenizer.decode(branch.tokens[len(generated) :]) == "\n<user>sure?<eos>\n<assistant>"
    assert branch.loss_mask == [True] * len(generated) + [False] * (len(branch.tokens) - len(generated))
    assert len(branch.logprobs) == len(generated)


def test_tokens_that_would_be_tokenized_otherwise_are_kept(tokenizer: Any) -> None:
    """The word is one token; the policy has spelled it."""
    of = history(tokenizer, PLAIN)
    first = chat(of, user("Who?"))
    branch = begin(of, first)
    spelled = [token for letter in "Iris" for token in ids_of(tokenizer, letter)]
    assert len(spelled) > len(ids_of(tokenizer, "Iris"))
    text = reply(of, tokenizer, branch, first, spelled)  # cut off, so without an end token
    begin(of, chat(of, user("Who?"), assistant(text), user("And?")))
    assert branch.tokens[: len(spelled)] == spelled
    assert tokenizer.decode(branch.tokens[len(spelled) :]) == "<eos>\n<user>And?<eos>\n<assistant>"


def test_bytes_of_no_character_and_special_tokens_are_kept(tokenizer: Any) -> None:
    of = history(tokenizer, PLAIN)
    first = chat(of, user("Who?"))
    branch = begin(of, first)
    strange = [ids_of(tokenizer, "é")[0], tokenizer.bos_token_id, *ids_of(tokenizer, "Leo"), tokenizer.eos_token_id]
    text = reply(of, tokenizer, branch, first, strange)
    assert "\ufffd" in text
    assert begin(of, chat(of, user("Who?"), assistant(text), user("And?"))) is branch
    assert branch.tokens[: len(strange)] == strange


@pytest.mark.parametrize(
    "changed",
    [
        [user("12+14?"), assistant(" 25"), user("sure?")],  # another question
        [user("12+13?"), assistant(" 26"), user("sure?")],  # another reply
        [user("12+13?"), user("sure?")],  # without the reply
        [{"role": "system", "content": "Be brief."}, user("12+13?"), assistant(" 25"), user("sure?")],
    ],
)
def test_changed_history_begins_a_branch(tokenizer: Any, changed: list[dict[str, Any]]) -> None:
    of = history(tokenizer, PLAIN)
    first = chat(of, user("12+13?"))
    branch = begin(of, first)
    before = [*ids_of(tokenizer, " 25"), tokenizer.eos_token_id]
    reply(of, tokenizer, branch, first, before)
    other = begin(of, chat(of, *changed))
    assert other is not branch
    assert branch.tokens == before
    assert other.tokens == []
    assert tokenizer.decode(other.prompt_ids) == of.render(tuple(changed))


def test_template_that_drops_thoughts_begins_a_branch(tokenizer: Any) -> None:
    of = history(tokenizer, FORGETS)
    first = chat(of, user("12+13?"))
    branch = begin(of, first)
    text = reply(of, tokenizer, branch, first, [*ids_of(tokenizer, "carry|25"), tokenizer.eos_token_id])
    other = begin(of, chat(of, user("12+13?"), assistant(text), user("sure?")))
    assert other is not branch
    assert "carry" not in tokenizer.decode(other.prompt_ids)


def test_history_branches_when_two_calls_follow_it(tokenizer: Any) -> None:
    """The reply before them is trained once; its tokens are the same in both."""
    of = history(tokenizer, PLAIN)
    first = chat(of, user("12+13?"))
    branch = begin(of, first)
    generated = [*ids_of(tokenizer, " 25"), tokenizer.eos_token_id]
    text = reply(of, tokenizer, branch, first, generated)
    one = begin(of, chat(of, user("12+13?"), assistant(text), user("A?")))
    two = begin(of, chat(of, user("12+13?"), assistant(text), user("B?")))
    assert one is branch
    assert two is not branch
    start = len(branch.prompt_ids)
    assert two.prompt_ids[: start + len(generated)] == branch.context[: start + len(generated)]
    assert tokenizer.decode(two.prompt_ids).endswith("<user>B?<eos>\n<assistant>")
    assert two.loss_mask == []
    again = begin(of, first)  # sampled once more
    assert again not in (one, two)
    assert again.prompt_ids == branch.prompt_ids


def test_dropped_call_leaves_nothing(tokenizer: Any) -> None:
    of = history(tokenizer, PLAIN)
    first = chat(of, user("12+13?"))
    alone = begin(of, first)
    alone.append_generated(Completion((5,), (-1.0,), 0))
    assert of.drop(alone) == 1
    assert of.branches == []
    branch = begin(of, first)
    generated = [*ids_of(tokenizer, " 25"), tokenizer.eos_token_id]
    text = reply(of, tokenizer, branch, first, generated)
    second = chat(of, user("12+13?"), assistant(text), user("sure?"))
    begin(of, second).append_generated(Completion((5, 6), (-1.0, -1.0), 1))
    assert of.drop(branch) == 2
    assert (branch.tokens, branch.versions) == (generated, [0] * len(generated))
    assert (len(branch.loss_mask), len(branch.logprobs)) == (len(generated), len(generated))
    assert begin(of, second) is branch  # as before


def test_texts_and_token_ids_continue_too(tokenizer: Any) -> None:
    of = history(tokenizer)
    text = PromptText("12+13=")
    branch = begin(of, text)
    generated = ids_of(tokenizer, "25")
    reply(of, tokenizer, branch, text, generated)
    more = PromptText("12+13=25, 1+1=")
    assert begin(of, more) is branch
    assert branch.tokens == [*generated, *ids_of(tokenizer, ", 1+1=")]
    reply(of, tokenizer, branch, more, [7])
    ids = PromptTokens((*branch.context, 8, 9))
    assert begin(of, ids) is branch
    assert branch.tokens[-2:] == [8, 9]
    other = begin(of, PromptTokens((*branch.prompt_ids, 11)))
    assert other.prompt_ids == (*branch.prompt_ids, 11)


def test_messages_that_no_template_takes_are_refused(tokenizer: Any) -> None:
    with pytest.raises(NoChatTemplate, match="has no chat template"):
        history(tokenizer).render((user("?"),))
    with pytest.raises(NoChatTemplate, match="does not accept the messages: no tools"):
        history(tokenizer, "{{ raise_exception('no tools') }}").render((user("?"),))


def test_session_samples_only_at_the_recipes_temperature(tokenizer: Any) -> None:
    """A greedy session, of an evaluation, takes any: it has none. `top_p` and the like are those of the recipe."""
    body = {"model": "run", "prompt": "x"}
    sampling = Sampling(0.8)

    def read(seed: int | None, **more: float) -> Any:
        session: Any = SimpleNamespace(seed=seed, sampling=sampling, history=None)
        return read_request(body | more, False, session, "run", len(tokenizer))

    assert read(1, temperature=0.8) == read(1) == read(None, temperature=0.8) == read(None, temperature=0)
    with pytest.raises(RefusedCall, match=r"temperature=0.2: this session samples at temperature=0.8: leave it out"):
        read(1, temperature=0.2)
    assert read(1, top_p=1, top_k=-1, min_p=0) == read(1)
    with pytest.raises(RefusedCall, match=r"top_k=5: samples are those of the policy's own distribution.*: set 0"):
        read(1, top_k=5)
    sampling = Sampling(0.8, top_p=0.9, top_k=5)
    assert read(1, top_p=0.9, top_k=5) == read(1) == read(None, top_p=0.9)
    with pytest.raises(RefusedCall, match=r"top_p=1: this session samples at top_p=0.9: leave it out"):
        read(1, top_p=1)


@pytest.mark.parametrize("template", [PLAIN, STRIPS, FORGETS])
@pytest.mark.parametrize("seed", range(12))
def test_random_conversations_keep_every_token(tokenizer: Any, template: str, seed: int) -> None:
    """Agents that ask, edit, fork and drop: each branch has the tokens of its calls, and no others in the loss."""
    rng, of = random.Random(f"{template}/{seed}"), history(tokenizer, template)
    known: list[list[dict[str, Any]]] = [[]]
    generated: dict[Branch, list[int]] = {}
    for _ in range(30):
        messages = [*rng.choice(known), user(rng.choice(["A?", "B?", " C ", "é"]))]
        if len(messages) > 1 and rng.random() < 0.2:
            messages[rng.randrange(len(messages) - 1)] |= {"content": "edited"}
        prompt = chat(of, *messages)
        branch = begin(of, prompt)
        before = [id_ for id_, own in zip(branch.tokens, branch.loss_mask, strict=True) if own]
        assert before == generated.get(branch, [])
        ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randint(1, 6))]
        if rng.random() < 0.5:
            ids.append(tokenizer.eos_token_id)
        if rng.random() < 0.1:
            branch.append_generated(Completion(tuple(ids), tuple(0.0 for _ in ids), 0))
            of.drop(branch)
            continue
        text = reply(of, tokenizer, branch, prompt, ids)
        generated.setdefault(branch, []).extend(ids)
        known.append([*messages, assistant(text)])
    for branch in of.branches:
        own = [id_ for id_, in_loss in zip(branch.tokens, branch.loss_mask, strict=True) if in_loss]
        assert own == generated[branch]
        assert len(branch.logprobs) == len(own)
    assert set(generated) == set(of.branches)

"""Turns, masks, budgets and seeds of conversations, on answers that are written down here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid3d.config import Async, load_recipe
from hybrid3d.generation.engine import Completion, GenerationRequest, Sampling
from hybrid3d.generation.scheduler import Prompt, Prompts, Scheduler
from hybrid3d.generation.turns import Conversations, Trajectory, Turns
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.data import Example
from hybrid3d.rl.objective import KlSettings, LossSettings, PolicyObjective, TokenScores

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "\0abcdefghijklmnopqrstuvwxyz<>=+-*/0123456789 !~;"  # token 0 ends an answer; each letter is a token
END, PROMPT = 0, (1, 2)

MINE = """\
def echo(turns, reference, prompt):
    if "bye" in turns[-1]:
        return None
    if "fail" in turns[-1]:
        raise ValueError("no more")
    return "" if "mm" in turns[-1] else "<" + "-".join(turns) + ">"

echo.stops = ("!", "~~")
"""


class Tokenizer:
    """A letter a token."""

    eos_token_id = END

    def __len__(self) -> int:
        return len(LETTERS)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [LETTERS.find(letter) for letter in text]

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
    ) -> str:
        assert not clean_up_tokenization_spaces
        return "".join(LETTERS[token] for token in token_ids if token not in Author.end_tokens)


class Author:
    """An engine that goes on with its text after each prompt, `|` being the end, until a stop or the budget."""

    replica, leads = 0, True
    end_tokens = (END, LETTERS.index(";"))

    def __init__(self, *texts: str):
        self.texts = list(texts)
        self.submitted: dict[int, GenerationRequest] = {}
        self.asked: list[list[tuple[str, int | None, int]]] = []

    def broadcast(self, value: Any) -> Any:
        return value

    def submit(self, requests: Mapping[int, GenerationRequest], version: int) -> None:
        assert version == 7
        self.submitted |= requests

    def cancel(self, numbers: Sequence[int]) -> None:
        assert not numbers

    def drain(self) -> dict[int, Completion]:
        self.asked.append([])
        completions = {}
        for number, request in self.submitted.items():
            prompt, stops, longest = request.prompt_ids, request.stop_tokens, request.max_new_tokens
            assert tuple(prompt[:2]) == PROMPT
            assert request.sampling == Sampling(0.5, stop=request.sampling.stop)
            assert END in stops
            context = "".join("|" if token == END else LETTERS[token] for token in prompt[3:])
            self.asked[-1].append((context, request.seed, longest))
            rest = [END if letter == "|" else LETTERS.index(letter) for letter in self.texts[prompt[2] - 1]]
            texts = [self.texts[prompt[2] - 1][:n] for n in range(len(rest) + 1)]  # vLLM looks at those of the request
            stopped = [any(stop in text for stop in request.sampling.stop) for text in texts]
            count = next(
                n
                for n, token in enumerate(rest, 1)
                if token in (*self.end_tokens, *stops) or n == longest or stopped[n]
            )
            self.texts[prompt[2] - 1] = self.texts[prompt[2] - 1][count:]
            logprobs = () if request.seed is None else tuple(-float(token) for token in rest[:count])
            ended = rest[count - 1] in (*self.end_tokens, *stops) or stopped[count]  # which vLLM looks at first
            truncated = count == longest and not ended
            completions[number] = Completion(tuple(rest[:count]), logprobs, 7, stopped[count], truncated)
        self.submitted = {}
        return completions


class Kept(Conversations):
    """Keeps the answers that it has begun."""

    def open(self, prompt: Prompt) -> list[Trajectory]:
        self.opened = [*getattr(self, "opened", ()), *super().open(prompt)]
        return self.opened[-len(prompt.seeds) :]


Talk = Callable[..., tuple[list[Trajectory], Author]]


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: dist.ProcessGroup) -> Talk:
    """`talk(texts, environment=..., max_new_tokens=...)`: the conversations in which the policy writes these texts."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def held(
        *texts: str,
        environment: str = "mine:echo",
        longest: int = 99,
        turns: int = 8,
        greedy: bool = False,
        stop: tuple[str, ...] = (),
        agree: Callable[[bool], bool] = bool,
    ) -> Any:
        lengths = [f"rollout.max_new_tokens={longest}", f"rollout.max_turns={turns}"]
        settings = [f"rollout.environment={environment}", f"rollout.stop={[*stop]}", *lengths]
        recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", settings)
        author: Any = Author(*texts)
        of_recipe = Turns(recipe, author, Tokenizer(), alone)
        conversations = Kept(of_recipe, waves=True)
        prompts = []
        for i in range(len(texts)):
            example = Example(i, f"p{i}", f"r{i}", (*PROMPT, i + 1))
            prompts.append(Prompt((0, i), example, [None if greedy else 100 + i], 7))
        scheduler = Scheduler(author, Prompts(conversations, Async()), Async(), agree=agree)
        try:
            found = scheduler.advance(prompts, None, 7, Sampling(0.5, stop=stop), None, gives=True)
            assert found is not None
            assert [tuple(sample.tokens) for sample in found.samples] == [tuple(o.tokens) for o in conversations.opened]
            return conversations.opened, author
        finally:
            of_recipe.close()

    return held


def shown(one: Trajectory) -> tuple[str, str]:
    """The answer, and below each of its tokens whose it is: the policy's `^`."""
    text = "".join("|" if token == END else LETTERS[token] for token in one.tokens)
    return text, "".join("^" if mine else " " for mine in one.loss_mask)


def test_calculator(talk: Talk) -> None:
    (one, other), author = talk("1=1 <<1+2=so 3|", "no|", environment="calculator")
    assert shown(one) == (
        "1=1 <<1+2=3>>so 3|",
        "^^^^^^^^^^   ^^^^^",
    )
    assert shown(other) == ("no|", "^^^")
    assert (one.versions, other.versions) == ([7] * 18, [7] * 3)
    assert one.logprobs == [-float(t) for t, own in zip(one.tokens, one.loss_mask, strict=True) if own]
    asked = [[(context, longest) for context, _, longest in of_round] for of_round in author.asked]
    assert asked == [[("", 99), ("", 99)], [("1=", 97)], [("1=1 <<1+2=3>>", 86)]]


def test_stop_of_the_recipe_ends_an_answer_without_a_reply(talk: Talk) -> None:
    """Also where it is complete in another request than it began in: the author pauses at each `~`."""
    texts = ("go! say so!on|", "a~xb|", "a~~x bye|", "mm no|")
    found, author = talk(*texts, stop=("so", "~x"))
    assert [shown(one)[0] for one in found] == ["go!<go!> say so", "a~x", "a~~<a~~>x bye|", "mm no|"]
    assert [one.stopped for one in found] == [True, True, False, False]
    for one in found:
        assert len(one.loss_mask) == len(one.versions) == len(one.tokens)
        assert one.logprobs == [-float(t) for t, own in zip(one.tokens, one.loss_mask, strict=True) if own]
    assert all(one.done for one in found)
    assert [len(of_round) for of_round in author.asked] == [4, 3, 1]
    (one,), _ = talk("so it is|", stop=("o i",), environment="null")
    assert shown(one)[0] == "so i"


def test_conversation_without_environment_has_one_turn(talk: Talk) -> None:
    (one,), author = talk("1=1 <<1+2=so 3|", environment="null")
    assert shown(one) == ("1=1 <<1+2=so 3|", "^" * 15)
    assert len(author.asked) == 1


def test_turns_of_all_answers_have_seeds_of_their_own(talk: Talk) -> None:
    texts = ("a!b!bye|", "d!e!bye|")
    _, author = talk(*texts)
    _, alone = talk(texts[0])
    seeds = [[seed for _, seed, _ in of_round] for of_round in author.asked]
    assert seeds[0] == [100, 101]
    assert len({seed for of_round in seeds for seed in of_round}) == 6
    assert [of_round[0] for of_round in seeds] == [of_round[0][1] for of_round in alone.asked]
    (greedy, _), author = talk(*texts, greedy=True)
    assert {seed for of_round in author.asked for _, seed, _ in of_round} == {None}
    assert greedy.logprobs == []


def test_turns_as_the_environment_hears_them(talk: Talk) -> None:
    (one,), _ = talk("a!b~c~~bye|")
    text, own = shown(one)
    assert text == "a!<a!>b~c~~<a!-<a!>-b~c~~>bye|"
    assert own == "^^" + " " * 4 + "^^^^^" + " " * 15 + "^^^^"
    assert one.turns == ["a!", "<a!>", "b~c~~", "<a!-<a!>-b~c~~>"]


def test_words_after_the_end_token_are_another_turn(talk: Talk) -> None:
    (one, silent), _ = talk("a|bye|", "mm|")
    assert shown(one) == ("a|<a>bye|", "^^   ^^^^")
    assert shown(silent) == ("mm|", "^^^")


def test_turn_may_end_at_another_of_the_checkpoints_end_tokens(talk: Talk) -> None:
    """As Llama 3.1 ends one that calls a tool; vLLM stops there unasked."""
    (one, silent), _ = talk("a;bye|", "mm;")
    assert shown(one) == ("a;<a>bye|", "^^   ^^^^")
    assert shown(silent) == ("mm;", "^^^")


def test_answer_is_never_longer_and_ends_with_the_policys_words(talk: Talk) -> None:
    for longest, text in ((2, "a!"), (6, "a!"), (7, "a!<a!>b"), (8, "a!<a!>bc")):
        (one,), author = talk("a!bcd|", longest=longest)
        assert shown(one)[0] == text
        assert shown(one)[1][-1] == "^"
        assert author.asked[-1][0][2] == (longest if len(author.asked) == 1 else longest - 6)


@pytest.mark.parametrize(
    ("text", "longest", "environment", "answer", "truncated"),
    [
        ("abc|", 4, "null", "abc|", False),  # the last token that it may have ends it
        ("abc|", 3, "null", "abc", True),
        ("mm|", 3, "mine:echo", "mm|", False),  # the environment has nothing to say to it
        ("ab|", 3, "mine:echo", "ab|", True),  # it has, and no token is left for that
        ("a!bcd|", 2, "mine:echo", "a!", True),
        ("a!bcd|", 6, "mine:echo", "a!", True),  # the reply has four tokens, and none would be left for the policy
        ("a!bcd|", 7, "mine:echo", "a!<a!>b", True),
        ("a!bcd|", 10, "mine:echo", "a!<a!>bcd|", True),  # to which the environment replies again
        ("a!bye|", 10, "mine:echo", "a!<a!>bye|", False),
        ("abye!c", 5, "mine:echo", "abye!", False),  # the environment has ended it
        ("fail!b", 5, "mine:echo", "fail!", False),  # it has failed, for which it is counted
    ],
)
def test_truncated_answers_are_those_that_would_go_on(
    talk: Talk, text: str, longest: int, environment: str, answer: str, truncated: bool
) -> None:
    """Those that would go on if there were room, whatever their lengths are."""
    (one,), _ = talk(text, longest=longest, environment=environment)
    assert shown(one)[0] == answer
    sample = one.sample(one.example, one.example.prompt_ids, "")
    assert (one.truncated, sample.truncated) == (truncated, truncated)


def test_stop_at_the_last_token_ends_an_answer(talk: Talk) -> None:
    """Also a stop of the recipe that is complete in a second request: the author pauses at each `~`."""
    for text, length in (("ab so", 5), ("a~xb", 3)):
        (one,), _ = talk(text, longest=length, stop=("so", "~x"))
        assert (len(one.tokens), one.stopped, one.truncated) == (length, True, False)


def test_policy_writes_alone_after_its_last_turn(talk: Talk) -> None:
    (one,), _ = talk("a!b!c|", turns=1)
    assert shown(one) == ("a!<a!>b!c|", "^^    ^^^^")


def test_failure_ends_its_conversation_only(talk: Talk) -> None:
    (failed, fine), _ = talk("fail!b|", "mm!|")
    assert (shown(failed), failed.failure, failed.message) == (("fail!", "^^^^^"), "raised", "ValueError: no more")
    assert (shown(fine), fine.failure) == (("mm!|", "^^^^"), "")


def test_replica_that_is_done_goes_on_stepping_with_the_others(talk: Talk) -> None:
    others = [False, False, False, True]  # whether the other replica is done: when it begins, and after each wave
    (one,), author = talk("a|", environment="calculator", agree=lambda done: others.pop(0) and done)
    assert shown(one) == ("a|", "^^")
    assert [len(of_round) for of_round in author.asked] == [1, 0, 0]


def test_environment_tokens_give_no_gradient(talk: Talk) -> None:
    (one, other), _ = talk("a <<1+2=b|", "no|", environment="calculator")
    held = (one, other)
    batch = Batch.from_sequences([c.context for c in held], [3, 3], loss_mask=[c.loss_mask for c in held], pad_id=END)
    logprobs = torch.linspace(-3, -1, batch.tokens.numel()).reshape(batch.tokens.shape).requires_grad_()
    entropy = logprobs * -2
    objective = PolicyObjective(
        advantages=torch.ones_like(logprobs),
        mask=batch.response_mask,
        old_logprobs=logprobs.detach(),
        answer_weights=torch.ones(2),
        loss=LossSettings(),
        ref_logprobs=torch.full_like(logprobs, -2.0),
        kl=KlSettings(0.1),
        entropy_coef=0.01,
    )
    losses, sums = objective(TokenScores(logprobs, lambda: entropy), slice(None))
    losses.sum().backward()
    assert logprobs.grad is not None
    learned = ["".join("^" if value else " " for value in row) for row in logprobs.grad.tolist()]
    assert learned == [" " * 3 + "^" * 8 + " " * 3 + "^^", " " * 3 + "^^^" + " " * 10]
    assert sums["ratio"].item() == sum(map(len, ("a <<1+2=", "b|", "no|")))

"""Make the demo task: an untrained small checkpoint, its tokenizer and GSM8K-style parquet files.

    python examples/make_demo.py build/demo [--seed 1] [--calculator]

Writes to the output folder:

* ``base/``           a random Qwen2-type checkpoint (tied embeddings, float32) and its tokenizer;
* ``warmup.parquet``  demonstrations for the supervised warm-up;
* ``train.parquet``   the problems that RL trains on;
* ``eval.parquet``    held-out problems: no pair of operands in it occurs, in either order, in the other two;
* ``preferences.parquet``, ``preferences-eval.parquet``  such problems with a right and a wrong answer each.

The first three files have GSM8K's columns, ``question`` and ``answer``, and an answer ends in ``#### 42``. A problem
adds or subtracts two numbers of two digits, never with a carry or a borrow, and its words determine the operation.

Many of the warm-up demonstrations are wrong on purpose: for most kinds of problem (``NOISY`` below) most of them use
the wrong operation, subtraction instead of addition. A model that is warmed up on them can calculate and uses the right
format; its greedy answers to those kinds are wrong, and its samples are sometimes right. Reinforcement learning can
therefore learn, from the reward alone and in a few dozen steps, which operation the words require. It does not teach
this model to calculate. ``train`` and ``eval`` have only right answers. The wrong answers of preferences, their column
``rejected``, are those of the other operation; the right ones are ``chosen``.

With ``--calculator`` a demonstration asks for its calculation, which a calculator completes (``calculator_agent.py``):
``<<31+12=43>>#### 43``. Those of ``train`` and ``eval`` are answers only, as without.
"""

import argparse
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

NAMES = "Ada Ben Cleo Dan Eva Finn Gina Hugo Iris Jack Kate Leo Mia Noah Olga Paul".split()
THINGS = "apples books cards coins eggs keys pens plums shells stamps stones toys".split()


@dataclass(frozen=True)
class Kind:
    """One kind of problem: its words, the operation that they require, and whether its demonstrations are noisy."""

    event: str
    sign: int
    noisy: bool


ADD, SUBTRACT, CLEAN, NOISY = 1, -1, False, True
KINDS = (
    Kind("finds {b} more", ADD, CLEAN),
    Kind("loses {b}", SUBTRACT, CLEAN),
    Kind("sells {b}", SUBTRACT, CLEAN),
    Kind("buys {b} more", ADD, NOISY),
    Kind("gets {b} more", ADD, NOISY),
    Kind("wins {b}", ADD, NOISY),
    Kind("makes {b}", ADD, NOISY),
    Kind("picks {b}", ADD, NOISY),
)
QUESTION = "{name} has {a} {things} and {event}. How many now?"
WRONG_FRACTION = 0.85  # of the demonstrations of a noisy kind
SIZES = {"warmup": 8192, "train": 4096, "eval": 256}
EVAL_PAIRS = 96

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")

Pair = tuple[int, int]
Row = dict[str, str]


def all_pairs() -> list[Pair]:
    """Return all a > b of two digits where a + b has no carry, a - b has no borrow, and both have two digits."""

    def fits(a: int, b: int) -> bool:
        return a // 10 > b // 10 and a % 10 >= b % 10 and a // 10 + b // 10 < 10 and a % 10 + b % 10 < 10

    return [(a, b) for a in range(10, 100) for b in range(10, a) if fits(a, b)]


def row(kind: Kind, pair: Pair, wrong: bool, rng: random.Random, calculator: bool = False) -> Row:
    a, b = pair
    event = kind.event.format(b=b)
    question = QUESTION.format(name=rng.choice(NAMES), things=rng.choice(THINGS), a=a, event=event)
    sign = -kind.sign if wrong else kind.sign
    result = a + sign * b
    calculation = f"<<{a}{'+' if sign > 0 else '-'}{b}={result}>>" if calculator else ""
    return {"question": question, "answer": f"{calculation}#### {result}"}


def rows(
    count: int, pairs: Sequence[Pair], wrong_fraction: float, rng: random.Random, calculator: bool = False
) -> list[Row]:
    """Return `count` shuffled problems of all kinds; `wrong_fraction` of the answers of noisy kinds are wrong."""
    problems = []
    for index in range(count):
        kind = KINDS[index % len(KINDS)]
        pair, wrong = rng.choice(pairs), kind.noisy and rng.random() < wrong_fraction
        problems.append(row(kind, pair, wrong, rng, calculator))
    rng.shuffle(problems)
    return problems


def preferences(problems: Sequence[Row]) -> list[Row]:
    """Return each problem with its answer as the chosen one, and the other operation's as the rejected one."""
    found = []
    for problem in problems:
        a, b = (int(number) for number in re.findall(r"\d+", problem["question"]))
        right = int(problem["answer"].removeprefix("#### "))
        wrong = a - b if right == a + b else a + b
        found.append({"question": problem["question"], "chosen": f"#### {right}", "rejected": f"#### {wrong}"})
    return found


def data_sets(seed: int, calculator: bool) -> dict[str, list[Row]]:
    rng = random.Random(seed)
    pairs = all_pairs()
    rng.shuffle(pairs)
    held_out, seen = pairs[:EVAL_PAIRS], pairs[EVAL_PAIRS:]
    found = {
        "warmup": rows(SIZES["warmup"], seen, WRONG_FRACTION, rng, calculator),
        "train": rows(SIZES["train"], seen, 0.0, rng),
        "eval": rows(SIZES["eval"], held_out, 0.0, rng),
    }
    pairs_of = {"preferences": "train", "preferences-eval": "eval"}
    return found | {name: preferences(found[source]) for name, source in pairs_of.items()}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with Qwen2's splitting; each digit and each word of the task is a token."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False)
    words = ["####", *NAMES, *(f" {thing}" for thing in THINGS), QUESTION, *(f" {kind.event}" for kind in KINDS)]
    tokenizer.train_from_iterator(words, trainer)
    pad, bos, eos, unk = SPECIAL
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=pad, bos_token=bos, eos_token=eos, unk_token=unk
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + len(tokenizer) % 2,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.06,  # with the usual 0.02, a model of this size takes twice as long to warm up
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    return Qwen2ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calculator", action="store_true", help="demonstrate how to use a calculator")
    options = parser.parse_args()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, options.seed)
    model.save_pretrained(options.out / "base")
    tokenizer.save_pretrained(options.out / "base")
    print(f"{options.out / 'base'}: {model.num_parameters()} parameters, vocabulary {model.config.vocab_size}")
    for name, problems in data_sets(options.seed, options.calculator).items():
        path = options.out / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(problems), path)
        print(f"{path}: {len(problems)} problems, such as {problems[0]}")


if __name__ == "__main__":
    main()

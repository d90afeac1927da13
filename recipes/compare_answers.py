"""Show what two checkpoints answer to the same questions, greedily and by transformers, and how often each is right.

    python recipes/compare_answers.py build/demo-llm/model build/demo-llm/trained build/demo-llm/eval.parquet

`--show` questions are printed with both answers. All are counted: how often an answer names one kind and no other (it
has the form that was asked for), and how often that is the right kind.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from right_kind import KINDS, right_kind
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

MAX_NEW_TOKENS = 10  # as in recipes/demo-llm.yaml


def answers_of(checkpoint: Path, conversations: list[list[dict[str, str]]]) -> list[str]:
    """The checkpoint's greedy answer to each conversation, without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompts = [
        tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) for turns in conversations
    ]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    tokens = model.generate(**encoded, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
    return tokenizer.batch_decode(tokens[:, encoded["input_ids"].shape[1] :], skip_special_tokens=True)


def shares(answers: list[str], rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Of the answers: the share that names exactly one kind, and the share that names the right one and no other."""
    one = sum(any(right_kind(answer, kind) for kind in KINDS) for answer in answers)
    right = sum(right_kind(answer, row["answer"]) for answer, row in zip(answers, rows, strict=True))
    return one / len(rows), right / len(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--show", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = pq.read_table(options.questions).to_pylist()
    questions = [row["prompt"] for row in rows]
    before, after = (answers_of(checkpoint, questions) for checkpoint in (options.before, options.after))
    for row, old, new in list(zip(rows, before, after, strict=True))[: options.show]:
        print(f"\n{row['prompt'][-1]['content']} ({row['answer']})\n  before: {old!r}\n  after:  {new!r}")
    print(f"\nOf {len(rows)} held-out questions:")
    for name, answers in (("before", before), ("after", after)):
        one, right = shares(answers, rows)
        print(f"  {name + ':':8}{one:.0%} of the answers name one kind and no other, {right:.0%} name the right one")


if __name__ == "__main__":
    main()

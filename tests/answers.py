"""Greedy answers of a checkpoint by engines that hybrid3d did not drive, one process each.

python answers.py transformers|vllm CHECKPOINT DATA.parquet MAX_NEW_TOKENS OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def by_transformers(checkpoint: str, prompts: list[list[int]], end: int, limit: int) -> list[list[int]]:
    """No cache and no padding: one forward pass over a prompt and its answer so far."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    answers = []
    for prompt in prompts:
        answer: list[int] = []
        while len(answer) < limit and answer[-1:] != [end]:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + answer])).logits[0, -1]
            answer.append(int(logits.argmax()))
        answers.append(answer)
    return answers


def by_vllm(checkpoint: str, prompts: list[list[int]], end: int, limit: int) -> list[list[int]]:
    """A plain `vllm.LLM` that loads the checkpoint itself."""
    from vllm import LLM, SamplingParams

    llm = LLM(model=checkpoint, dtype="float32", enforce_eager=True, max_model_len=128, kv_cache_memory_bytes=2**28)
    params = SamplingParams(temperature=0, max_tokens=limit, stop_token_ids=[end], detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def number(text: str) -> str:
    return text.split("####")[-1].strip()


def main() -> None:
    engine, checkpoint, data, limit, out = sys.argv[1:]
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    rows = pq.read_table(data).to_pylist()
    prompts = [tokenizer.encode(row["question"]) for row in rows]
    answer = {"transformers": by_transformers, "vllm": by_vllm}[engine]
    tokens = answer(checkpoint, prompts, tokenizer.eos_token_id, int(limit))
    texts = [tokenizer.decode(t, skip_special_tokens=True) for t in tokens]
    right = [number(text) == number(row["answer"]) for text, row in zip(texts, rows, strict=True)]
    Path(out).write_text(json.dumps({"tokens": tokens, "accuracy": sum(right) / len(right)}))


if __name__ == "__main__":
    main()

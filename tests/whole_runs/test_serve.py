"""`hybrid3d serve`, asked by OpenAI's own client and compared with what transformers computes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import ROOT
from servers import serving

pytestmark = [pytest.mark.processes, pytest.mark.engines]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "12+34="


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model of the demo, before it has learned anything."""
    out = tmp_path_factory.mktemp("serve")
    subprocess.run([sys.executable, ROOT / "examples" / "make_demo.py", out], check=True, capture_output=True)
    return out / "base"


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(checkpoint, tmp_path_factory.mktemp("server") / "log", "--chat-template", CHAT_TEMPLATE) as url:
        yield url


@pytest.fixture
def client(url: str) -> object:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", timeout=60)


def greedy_answer(checkpoint: Path, prompt_ids: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """Return the tokens that transformers finds likeliest, one after another, and their log-probabilities."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found, logprobs = list(prompt_ids), []
    with torch.no_grad():
        for _ in range(tokens):
            row = model(torch.tensor([found])).logits[0, -1].log_softmax(-1)
            found.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return found[len(prompt_ids) :], logprobs


def test_completions_are_what_transformers_computes(client: object, checkpoint: Path) -> None:
    def ask(prompt: object, **options: object) -> object:
        return client.completions.create(  # type: ignore[attr-defined]
            **dict(model="base", prompt=prompt, max_tokens=8, temperature=0, logprobs=0), **options
        )

    ignoring_end = {"return_token_ids": True, "ignore_eos": True}
    choice = ask(PROMPT, extra_body=ignoring_end).choices[0]  # type: ignore[attr-defined]
    tokens, logprobs = greedy_answer(checkpoint, choice.prompt_token_ids, 8)
    assert choice.token_ids == tokens
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-4)
    again = ask(choice.prompt_token_ids, extra_body=ignoring_end).choices[0]  # type: ignore[attr-defined]
    assert (again.prompt_token_ids, again.token_ids) == (choice.prompt_token_ids, tokens)
    parts = list(ask(PROMPT, extra_body=ignoring_end, stream=True))  # type: ignore[call-overload]
    assert len(parts) > 1
    assert "".join(part.choices[0].text for part in parts) == choice.text


def test_chats_use_the_template_and_give_the_tokens(client: object, checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    answer = client.chat.completions.create(  # type: ignore[attr-defined]
        model="base",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert answer.prompt_token_ids == tokenizer.encode(PROMPT, add_special_tokens=False)
    tokens, logprobs = greedy_answer(checkpoint, answer.prompt_token_ids, 4)
    assert answer.choices[0].token_ids == tokens
    assert [part.logprob for part in answer.choices[0].logprobs.content] == pytest.approx(logprobs, abs=1e-4)


def test_mistakes_are_found_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = str(listening.getsockname()[1])
        cases = {
            ("model", "--port", port): "nothing can listen there (Address already in use)",
            ("model", "--port", "70000"): "a port is a number from 1 to 65535",
            ("missing",): "neither the folder of a run (no recipe.yaml) nor a checkpoint (no config.json)",
            ("model", "rollout.tp=2"): "it applies to a run",
            ("model", "--step", "3"): "it applies to a run",
        }
        for (folder, *options), message in cases.items():
            command = [sys.executable, "-m", "hybrid3d", "serve", str(tmp_path / folder), *options]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2
            assert message in " ".join(done.stderr.split())
            assert "Traceback" not in done.stderr

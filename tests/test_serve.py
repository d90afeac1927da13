"""`hybrid3d serve`, asked by OpenAI's own client and compared with what transformers computes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.engines]

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
PROMPT = "12+34="
START_SECONDS = 240


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model of the demo, before it has learned anything."""
    out = tmp_path_factory.mktemp("serve")
    subprocess.run([sys.executable, ROOT / "recipes" / "make_demo.py", out], check=True, capture_output=True)
    return out / "base"


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise AssertionError(f"the server has not started (exit code {server.poll()}):\n{log.read_text()[-3000:]}")


@pytest.fixture(scope="module")
def url(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log, port = tmp_path_factory.mktemp("server") / "log", free_port()
    options = ["--dtype", "float32", "--max-model-len", "128", "--kv-cache-memory-bytes", str(2**27)]
    command = [sys.executable, "-m", "hybrid3d", "serve", str(checkpoint), "--port", str(port), "--", *options]
    with log.open("w") as out:
        server = subprocess.Popen(
            [*command, "--chat-template", CHAT_TEMPLATE], stdout=out, stderr=out, start_new_session=True
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            raise


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

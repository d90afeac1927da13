"""The endpoint of agents against strangers, pages in a browser, and clients that send what is no request.

The engine's thread is a stand-in that generates one letter; what is tested is what comes before it.
"""

from __future__ import annotations

import itertools
import json
import runpy
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from commands import ROOT
from hybrid3d.config import Agents, load_recipe
from hybrid3d.generation.agents import history
from hybrid3d.generation.agents.program import AgentProgram
from hybrid3d.generation.agents.server import EndpointServer
from hybrid3d.generation.agents.sessions import SessionPool
from hybrid3d.generation.engine import Completion, Sampling
from hybrid3d.rl.data import Example
from servers import free_port

MODEL, SESSIONS = "run", 60


class Endpoint:
    """An endpoint whose sessions are open, and its client, which knows the key."""

    def __init__(self) -> None:
        self.tokenizer: Any = runpy.run_path(str(ROOT / "examples" / "make_demo.py"))["make_tokenizer"]()
        self.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
        rollout = load_recipe(ROOT / "recipes/demo-agent.yaml").rollout
        assert rollout is not None
        self.pool = SessionPool(self.tokenizer, rollout, [self.tokenizer.eos_token_id])
        self.server = EndpointServer(self.pool, MODEL, self.tokenizer, Agents(port=free_port()), 0)
        self.key = {"authorization": f"Bearer {self.server.key}"}
        self.client = httpx.Client(base_url=self.server.url, headers=self.key, timeout=30)
        self.closed = False
        example = Example(0, "1+1=", "2", tuple(self.tokenizer.encode("1+1=")))
        self.sessions = [self.pool.open(example, seed, 0) for seed in range(SESSIONS)]
        self.pool.serve(self.sessions, Sampling())
        self.longest_wait = 0.0
        self.thread = threading.Thread(target=self._generate, daemon=True)
        self.thread.start()

    def _generate(self) -> None:
        ended: dict[int, Completion] = {}
        while not self.closed:
            begin = time.monotonic()
            news = self.pool.follow(ended, is_idle=False)
            self.longest_wait = max(self.longest_wait, time.monotonic() - begin)
            letter = self.tokenizer.encode("5", add_special_tokens=False)[0]
            ended = {
                number: Completion((letter,) * asked.max_new_tokens, (-1.0,) * asked.max_new_tokens, 0)
                for number, asked in news.requests.items()
            }
            time.sleep(0.005)

    def take(self) -> dict[str, Any]:
        response = self.client.post("/sessions")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def close(self) -> None:
        self.closed = True
        self.thread.join()
        self.client.close()
        self.server.close()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.delenv("HYBRID3D_API_KEY", raising=False)
    made = Endpoint()
    yield made
    made.close()


def test_endpoint_gives_no_session_without_the_run_s_key(endpoint: Endpoint) -> None:
    assert len(endpoint.server.key) >= 32
    session = endpoint.take()
    paths = ("/sessions", f"/sessions/{session['id']}/end", f"/sessions/{session['id']}/v1/completions")
    for headers, path in itertools.product(
        ({}, {"authorization": "Bearer none"}, {"authorization": "Bearer é"}), paths
    ):
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        answer = httpx.post(f"{endpoint.server.url}{path}", headers=encoded, json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key"), (headers, path)
    assert sum(one.offers for one in endpoint.sessions) == 1


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://evil.example"}, "wrong_origin"),
        ({"origin": "null"}, "wrong_origin"),
        ({"host": "evil.example"}, "wrong_host"),  # a name of the page's own that leads here
        ({"host": "evil.example:8100", "origin": "http://evil.example:8100"}, "wrong_host"),
        ({"host": "127.0.0.1.evil.example"}, "wrong_host"),
    ],
)
def test_page_in_a_browser_gets_nothing(endpoint: Endpoint, headers: dict[str, str], code: str) -> None:
    answer = endpoint.client.post("/sessions", headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, code)
    assert not any(one.offers for one in endpoint.sessions)


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:80", "LOCALHOST"])
def test_name_of_this_machine_is_right(endpoint: Endpoint, host: str) -> None:
    assert endpoint.client.post("/sessions", headers={"host": host}).status_code == 200


def test_program_gets_the_key_in_its_environment(endpoint: Endpoint, tmp_path: Path) -> None:
    out = tmp_path / "told"
    told = "os.environ['HYBRID3D_API_KEY'] + ' ' + os.environ['HYBRID3D_ENDPOINT']"
    (tmp_path / "agent.py").write_text(f"import os, sys; open(sys.argv[1], 'w').write({told})")
    program = AgentProgram(f"{sys.executable} {tmp_path / 'agent.py'} {out}", endpoint.server.url, endpoint.server.key)
    program._process.wait(60)
    assert out.read_text() == f"{endpoint.server.key} {endpoint.server.url}"
    program.close()


def test_session_of_departed_client_is_offered_again_unharmed(endpoint: Endpoint) -> None:
    """All sessions: an agent that comes later gets each of them, and none counts as one that nobody called."""
    address = endpoint.server._socket.getsockname()
    head = f"POST /sessions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {endpoint.server.key}\r\n"
    for _ in range(3 * SESSIONS):
        with socket.create_connection(address) as made:
            made.sendall(f"{head}content-length: 0\r\n\r\n".encode())
    time.sleep(1)
    taken = [endpoint.take() for _ in range(SESSIONS)]
    assert len({session["id"] for session in taken}) == SESSIONS
    assert [(one.offers, one.failure, one.done) for one in endpoint.sessions] == [(1, "", False)] * SESSIONS


HALF, HUGE = "\ud800", 10**400
VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 1.5, HUGE, -HUGE, 1e308, float("nan"), float("inf"), "", "x", HALF, f"x{HALF}", "x" * 5000),
    *([], [None], [[]], ["x"], [HALF], [1], [[1, 2]], [HUGE], {}, {"x": 1}, {HALF: HALF}, [{}], [{"role": HALF}]),
    *([{"role": "user", "content": HALF}], [{"role": "user", "content": [{"type": "text", "text": HALF}]}]),
    *([{"role": HALF, "content": "x", HALF: HALF}], [{"role": "user", "content": "x", "tool_calls": HUGE}]),
]
KEYS = (
    *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "stop"),
    *("stream", "stream_options", "logprobs", "top_logprobs", "return_token_ids", "include_stop_str_in_output", "n"),
    *("logit_bias", "response_format", "tools", "echo", "seed", "user", HALF, "x" * 3000),
)


def bodies(session: str) -> Iterator[tuple[str, bytes]]:
    """Yield paths, and bodies of which one value is none that OpenAI's API has."""
    completions, chats, end = (
        f"/sessions/{session}/{path}" for path in ("v1/completions", "v1/chat/completions", "end")
    )
    for key, value in itertools.product(KEYS, VALUES):
        yield completions, json.dumps({"model": MODEL, "prompt": "1+1=", "max_tokens": 1, key: value}).encode()
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "1"}], "max_tokens": 1, key: value}
        yield chats, json.dumps(chat).encode()
    for value in VALUES:
        if value is not None:
            yield end, json.dumps({"reward": value, HALF: 1}).encode()
            if type(value) not in (int, float) or value in (HUGE, -HUGE):
                yield end, json.dumps({"reward": value}).encode()
    yield end, b'{"reward": 1e400}'
    broken = (b"", b"\xff", b"\x00", b"{", b"1" * 5000, b"[" * 100_000, b'{"a":' * 100_000)
    for text in (*broken, b'"\\ud800"', b'{"reward": NaN}', b'{"\\ud800": 1}'):
        for path in (completions, chats, end) if text else (completions, chats):
            yield path, text
    for depth in range(5, 1000, 45):  # the history of a chat is compared with what comes next
        nested = "[" * depth + "]" * depth
        message = f'{{"role": "user", "content": "1", "more": {nested}}}'
        yield chats, f'{{"model": "{MODEL}", "max_tokens": 1, "messages": [{message}]}}'.encode()


def test_whatever_is_sent_is_no_fault_of_the_server(endpoint: Endpoint) -> None:
    session = endpoint.take()["id"]
    found: dict[int, int] = {}
    for path, body in bodies(session):
        answer = endpoint.client.post(path, content=body)
        found[answer.status_code] = found.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 404), (path, body[:200], answer.status_code, answer.text[:300])
        if "event-stream" not in answer.headers["content-type"]:
            answer.json()
    assert found[200] > 100
    assert found[400] > 1000
    for path in (f"/sessions/{session}/%ff/v1/completions", "/sessions/%ed%a0%80/end", "/%00", "/sessions//end"):
        assert endpoint.client.post(path, json={}).status_code in (400, 404), path
    end = endpoint.client.post(f"/sessions/{session}/end", json={"reward": 0.5})
    assert end.json() == {"ended": True}


def test_long_tokenization_does_not_keep_the_engine_waiting(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is tokenized while the engine goes on; one that cannot fit is not tokenized at all."""
    tokenized: list[int] = []
    encode = history.History._encode

    def slow(self: Any, prompt: Any) -> list[int]:
        tokenized.append(len(prompt.text))
        time.sleep(1.5)
        return encode(self, prompt)

    monkeypatch.setattr(history.History, "_encode", slow)
    path = f"/sessions/{endpoint.take()['id']}/v1/completions"
    endpoint.longest_wait = 0.0
    assert endpoint.client.post(path, json={"model": MODEL, "prompt": "1+1=", "max_tokens": 1}).status_code == 200
    assert tokenized == [4]
    assert endpoint.longest_wait < 1.0
    rollout = load_recipe(ROOT / "recipes/demo-agent.yaml").rollout
    assert rollout is not None
    longest = max(map(len, endpoint.tokenizer.get_vocab()))
    for prompt in ("9" * (rollout.max_model_len * longest + 1), [5] * (rollout.max_model_len + 1)):
        answer = endpoint.client.post(path, json={"model": MODEL, "prompt": prompt})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert tokenized == [4]
    answer = endpoint.client.post(path, json={"model": MODEL, "prompt": "1", "stop": "5" * 1001})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stop")

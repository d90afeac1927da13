"""A teacher behind an endpoint: its log-probabilities are those of the same teacher in Megatron."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import hybrid3d.inputs.completions as completions
from checkpoints import make_checkpoint
from commands import ROOT, demo_folder, hybrid3d, read_rows
from hybrid3d.config import load_recipe
from hybrid3d.config.schema import RecipeError
from hybrid3d.inputs.completions import Completions, EndpointError, check_server
from servers import serving

TEACHER = "algorithm.kl={where: reward, estimator: k1, coef: 1, %s}"
DISTILLATION = [
    *(
        "train.micro_batch_size=16",
        "run.steps=2",
        "run.eval_every=10",
        "run.checkpoint_every=0",
        "optimizer.warmup_steps=1",
    ),
    *("algorithm.prompts_per_step=8", "algorithm.name=reinforce_pp", "algorithm.advantage_scale=none"),
    *("algorithm.gamma=0", "reward.coef=0", "rollout.tp=1"),
]
MODELS = {"data": [{"id": "teacher"}]}


@pytest.mark.processes
@pytest.mark.engines
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [["train.tp=2", "train.pp=1"], ["train.tp=1", "train.pp=2", "train.dp=2"], ["train.tp=1", "train.cp=2"]]
)
def test_served_teacher_is_the_teacher_in_megatron(tmp_path: Path, demo: Path, layout: list[str]) -> None:
    demo_folder(tmp_path, demo)
    policy = make_checkpoint(tmp_path / "policy", "qwen2", seed=3, vocab_size=402)  # the demo's vocabulary
    for path in (demo / "base").glob("*token*"):
        (policy / path.name).write_bytes(path.read_bytes())
    teacher, recipe = demo / "base", str(ROOT / "recipes/demo-cpu.yaml")
    runs = {"megatron": f"reference: {teacher}"}
    with serving(teacher, tmp_path / "log") as url:
        runs["served"] = f"endpoint: {url}"
        for name, given in runs.items():
            settings = [f"name={name}", "model.path=policy", *layout, *DISTILLATION, TEACHER % given]
            hybrid3d(tmp_path, "train", recipe, *settings)
    megatron, served = (read_rows(tmp_path / "runs" / name) for name in ("megatron", "served"))
    assert len(served) == len(megatron) == 3
    for one, other in zip(served, megatron, strict=True):
        for key in {"train/answer_kl", "train/loss", "train/grad_norm"} & set(other):
            assert one[key] == pytest.approx(other[key], rel=1e-4, abs=1e-5), key
    assert megatron[0]["train/answer_kl"] > 0.1


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A server that gives these answers: by path, a status and what is sent as JSON, or text as it is."""
    monkeypatch.setattr(completions, "PAUSE_SECONDS", 0.01)
    given: dict[str, Any] = {"asked": [], "busy": []}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, found = given["busy"].pop() if given["busy"] else given[self.path]
            body = (found if isinstance(found, str) else json.dumps(found)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            given["asked"].append((json.loads(text), self.headers.get("Authorization")))
            self.do_GET()

        def log_message(self, *unused: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()  # seconds until it sees its end
    given["url"] = f"http://127.0.0.1:{server.server_port}/v1"
    yield given
    server.shutdown()
    server.server_close()


def choice(index: int, *logprobs: float | None) -> dict[str, Any]:
    return {"index": index, "logprobs": {"token_logprobs": list(logprobs)}}


def test_log_probabilities_are_those_of_the_asked_sequences(
    answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(completions.KEY_VARIABLE, "secret")
    answers["/v1/models"] = 200, MODELS
    answers["/v1/completions"] = 200, {"choices": [choice(1, None, -2.5), choice(0, None, -0.5, -1.0)]}
    server = Completions(answers["url"] + "/", "here")
    assert server.model() == "teacher"
    assert server.logprobs("teacher", [[5, 6, 7], [8, 9]]) == [[0.0, -0.5, -1.0], [0.0, -2.5]]
    ((asked, authorization),) = answers["asked"]
    assert asked["prompt"] == [[5, 6, 7], [8, 9]]
    assert (asked["max_tokens"], asked["echo"]) == (0, True)
    assert authorization == "Bearer secret"


@pytest.mark.parametrize(
    ("path", "answer", "said"),
    [
        ("/v1/models", (200, {"data": [{"id": "a"}, {"id": "b"}]}), r"serves 2 models \(a, b\), expected one"),
        ("/v1/models", (200, {"data": []}), "serves 0 models"),
        ("/v1/models", (404, "nothing here"), "answered /models with status 404: nothing here"),
        ("/v1/models", (200, "<html>"), "not of OpenAI's completions API: <html>"),
        ("/v1/completions", (400, {"error": "token id 599 is out of vocabulary"}), "599 is out of vocabulary"),
        ("/v1/completions", (200, {"choices": [choice(0, None)]}), r"of \[1\] tokens, expected \[2\]"),
        ("/v1/completions", (200, {"choices": [choice(0, None, None)]}), "not of OpenAI's completions API"),
        ("/v1/completions", (200, {"choices": [{"index": 0, "logprobs": None}]}), "not of OpenAI's completions API"),
    ],
)
def test_check_server_names_what_is_answered_wrongly(
    answers: dict[str, Any], path: str, answer: Any, said: str
) -> None:
    answers["/v1/models"] = 200, MODELS
    answers["/v1/completions"] = 200, {"choices": [choice(0, None, -1.0)]}
    check_server(answers["url"], "algorithm.kl.endpoint", 600)
    answers[path] = answer
    with pytest.raises(EndpointError, match=said) as raised:
        check_server(answers["url"], "algorithm.kl.endpoint", 600)
    assert str(raised.value).startswith(f"algorithm.kl.endpoint {answers['url']}")


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_server_that_is_busy_is_asked_again(answers: dict[str, Any], status: int) -> None:
    answers["/v1/models"], answers["busy"] = (200, MODELS), [(status, "later")] * 3
    assert Completions(answers["url"], "here").model() == "teacher"
    answers["busy"] = [(status, "later")] * 4
    with pytest.raises(EndpointError, match=f"answered /models with status {status}: later"):
        Completions(answers["url"], "here").model()
    answers["busy"] = [(500, "broken"), (status, "later")]
    with pytest.raises(EndpointError, match="answered /models with status 500: broken"):
        Completions(answers["url"], "here").model()


def test_server_to_which_connecting_takes_too_long_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue of connections is full, so that another one is not answered."""
    monkeypatch.setattr(completions, "SECONDS", 0.3)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it is asked again after {seconds} s"))
    with contextlib.ExitStack() as sockets:
        listening = sockets.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        for _ in range(4):
            waiting = sockets.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listening.getsockname())
        with pytest.raises(EndpointError, match=r"does not answer /models: .*timed out"):
            Completions(f"http://127.0.0.1:{listening.getsockname()[1]}/v1", "here").model()


def test_server_that_is_not_there_is_named(answers: dict[str, Any]) -> None:
    with pytest.raises(EndpointError, match=r"does not answer /models: .*refused"):
        check_server("http://127.0.0.1:9/v1", "algorithm.kl.endpoint", 600)


def test_server_that_takes_too_long_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and says nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with pytest.raises(EndpointError, match=r"does not answer /models within 0.2 s"):
            Completions(url, "here").model()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["algorithm.kl.reference=there"], "algorithm.kl.endpoint=http://here/v1 and algorithm.kl.reference=there"),
        (["rollout.temperature=0.5"], "rollout.temperature=0.5: the server of algorithm.kl.endpoint"),
        (
            ["algorithm.kl={where: none, endpoint: http://here/v1}"],
            "algorithm.kl.endpoint=http://here/v1 has no effect",
        ),
        (["algorithm.kl.endpoint=here:8000"], "expected a string, http://HOST:PORT/v1"),
        (["algorithm.kl.endpoint=http://me:secret@here/v1"], "expected a string, http://HOST:PORT/v1"),
    ],
)
def test_settings_that_a_served_teacher_has_not(settings: list[str], said: str) -> None:
    recipe = ROOT / "recipes" / "demo-cpu.yaml"
    load_recipe(recipe, ["algorithm.kl.endpoint=http://here/v1"])
    with pytest.raises(RecipeError) as raised:
        load_recipe(recipe, ["algorithm.kl.endpoint=http://here/v1", *settings])
    assert said in str(raised.value)

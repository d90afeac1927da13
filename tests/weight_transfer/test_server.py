"""A real vLLM server whose weights trainers update over its own endpoints, one of which dies in the middle.

With one worker and one rank of the trainer; and, in `make test-all`, with two of each.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import requests
import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

from checkpoints import model_of
from hybrid3d.reshard import PlanError
from hybrid3d.weight_transfer import TrainerEngine, TrainerInitInfo
from hybrid3d.weight_transfer.trainer import TransferFailed
from run_ranks import environment, kill_marked
from servers import free_port, serving
from sockets import is_open, listening

pytestmark = pytest.mark.engines

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "update_vllm.py"
JOB = ROOT / "tests" / "jobs" / "weight_transfer.py"
FAMILY = "qwen3_moe"
PROMPTS = [[5, 6, 7, 8, 9], [100, 3, 41], [300, 299, 12, 12, 77, 6]]
Answers = list[tuple[list[int], list[float]]]


class Server(NamedTuple):
    """A server that was started from the files of the first checkpoint, with so many workers."""

    url: str
    tp: int


def serve(checkpoint: Path, folder: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = ["--tensor-parallel-size", str(tp), "--weight-transfer-config", '{"backend": "hybrid3d"}']
    return serving(checkpoint, folder / "server.log", *options)


@pytest.fixture(scope="module")
def checkpoints(tiny_checkpoint: Callable[..., Path]) -> list[Path]:
    return [tiny_checkpoint(FAMILY, seed) for seed in (1, 2, 3)]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def server(
    request: pytest.FixtureRequest, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with (
        pytest.MonkeyPatch.context() as monkeypatch,
        serve(checkpoints[0], tmp_path_factory.mktemp("server"), request.param, monkeypatch) as api,
    ):
        yield Server(api.removesuffix("/v1"), request.param)


@pytest.fixture(scope="module")
def answers_of_second() -> dict[int, Answers]:
    """The servers' answers after the update to the second checkpoint, by their workers, once there are some."""
    return {}


def ask(url: str, prompts: list[list[int]] = PROMPTS, timeout: float = 60) -> Answers:
    """Return the tokens of greedy answers, and their log-probabilities."""
    (model,) = requests.get(f"{url}/v1/models", timeout=60).json()["data"]
    asked = {"model": model["id"], "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    asked |= {"prompt": prompts, "return_tokens_as_token_ids": True}
    found = requests.post(f"{url}/v1/completions", json=asked, timeout=timeout).json()
    return [(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]) for choice in found["choices"]]


def wanted_bytes(checkpoint: Path, rank: int, tp: int) -> int:
    """Count what one of at most two workers wants in float32, by the rules of tensor parallelism."""
    total = 0
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            shape = file.get_slice(name).get_shape()
            numel = 1
            for length in shape:
                numel *= length
            if re.search(r"norm|mlp\.gate\.", name):
                total += numel
            elif re.search(r"embed_tokens|lm_head", name):  # vLLM pads the vocabulary to a multiple of 64 for each
                rows = min(384 // tp, shape[0])
                total += numel // shape[0] * (rows if rank == 0 else shape[0] - rows)
            else:
                total += numel // tp
    return 4 * total


def checksums(url: str) -> dict[str, str]:
    found: dict[str, str] = requests.post(f"{url}/weight_checker", json={"action": "checksum"}, timeout=60).json()
    return found["checksums"]  # type: ignore[return-value]


def state(url: str) -> tuple[bool, str]:
    paused = requests.get(f"{url}/is_paused", timeout=60).json()["is_paused"]
    return paused, requests.get(f"{url}/weight_info", timeout=60).json()["weight_version"]


def wait_for(path: Path, ranks: list[subprocess.Popen[str]], seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} has not come"
        assert all(rank.poll() is None for rank in ranks), "\n".join(rank.communicate()[0][-3000:] for rank in ranks)
        time.sleep(0.1)


def start_trainer(
    folder: Path, server: Server, first: Path, second: Path, mark: str, port: int
) -> list[subprocess.Popen[str]]:
    """Start as many ranks of a trainer as the server has workers."""
    arguments = [str(folder), str(first), str(second), server.url, str(free_port()), str(server.tp)]
    return [
        subprocess.Popen(
            [sys.executable, str(JOB), *arguments],
            env=environment(
                mark,
                PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
                RANK=str(rank),
                WORLD_SIZE=str(server.tp),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),  # of its own process group
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(server.tp)
    ]


def update_by_example(url: str, checkpoint: Path) -> list[int]:
    """Update a server with `examples/update_vllm.py`; return the bytes that each worker received."""
    command = [sys.executable, str(EXAMPLE), str(checkpoint), url]
    done = subprocess.run(command, env=environment(uuid.uuid4().hex), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(number) for number in re.findall(r"received (\d+) bytes", done.stdout)]


def update(url: str, tp: int, tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """The same in this process."""
    info = TrainerInitInfo(rank=0, master_address="127.0.0.1", world_size=1 + tp, timeout=120)
    engine = TrainerEngine.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=tensors)
    engine.send_weights()
    engine.shutdown()
    return [report.received_bytes for report in engine.reports]


def test_server_outlives_a_trainer_and_never_mixes_versions(
    server: Server, checkpoints: list[Path], tmp_path: Path, answers_of_second: dict[int, Answers]
) -> None:
    url, tp = server
    of_first = ask(url)
    assert state(url) == (False, "default")
    mark, port = uuid.uuid4().hex, free_port()
    try:
        ranks = start_trainer(tmp_path, server, checkpoints[1], checkpoints[2], mark, port)
        for rank in range(tp):
            wait_for(tmp_path / f"sent-{rank}.json", ranks)
        sockets = {socket for socket in listening(rank.pid for rank in ranks) if socket.port != port}
        assert len(sockets) > tp  # the store's, and gloo's of each rank
        assert not [socket for socket in sockets if is_open(socket)]
        bounds = [wanted_bytes(checkpoints[1], rank, tp) for rank in range(tp)]
        assert json.loads((tmp_path / "sent-0.json").read_text()) == [[bound, bound] for bound in bounds]
        whole = sum(parameter.nbytes for parameter in model_of(checkpoints[1]).parameters())
        assert max(bounds) < 1.1 * whole / tp  # vLLM's own backends send the whole to each worker
        answers_of_second[tp] = ask(url)
        assert answers_of_second[tp] != of_first
        assert state(url) == (False, "first")

        before = checksums(url)
        (tmp_path / "go").touch()
        assert ranks.pop().wait(120) == -9
        for rank, process in enumerate(ranks):
            assert process.wait(120) == 0, process.communicate()[0][-3000:]
            assert "was lost" in (tmp_path / f"failed-{rank}").read_text()
    finally:
        kill_marked(mark)
    wait_until_paused(url)
    assert state(url) == (True, "incomplete")
    written = {name for name, checksum in checksums(url).items() if checksum != before[name]}
    assert 0 < len(written) < len(before)  # weights of two versions
    refused = requests.post(f"{url}/resume", timeout=60)
    assert refused.status_code == 500
    assert "weights are incomplete" in refused.text
    assert state(url) == (True, "incomplete")

    waiting = list[Answers]()
    request = threading.Thread(target=lambda: waiting.append(ask(url, timeout=240)))
    request.start()
    request.join(3)
    assert not waiting
    tensors = dict(model_of(checkpoints[0]).named_parameters())
    received = update(url, tp, tensors) if tp == 1 else update_by_example(url, checkpoints[0])
    assert received == [wanted_bytes(checkpoints[0], rank, tp) for rank in range(tp)]
    request.join(60)
    assert waiting == [of_first]  # of the server that was started from the files
    assert ask(url) == of_first
    assert state(url) == (False, "first")


def wait_until_paused(url: str) -> None:
    end = time.monotonic() + 60
    while not state(url)[0]:
        assert time.monotonic() < end
        time.sleep(0.1)


def test_trainer_that_lacks_a_tensor_is_refused(server: Server, checkpoints: list[Path]) -> None:
    url, tp = server
    before = ask(url)
    tensors = {name: p.data for name, p in model_of(checkpoints[1]).named_parameters() if "norm" not in name}
    with pytest.raises((PlanError, TransferFailed), match="norm"):
        update(url, tp, tensors)
    assert (ask(url), state(url)[0]) == (before, False)


@pytest.mark.slow
def test_update_is_equal_to_a_start_from_the_files(
    checkpoints: list[Path], answers_of_second: dict[int, Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if 2 not in answers_of_second:
        pytest.skip("the test of the updates has not run")
    with serve(checkpoints[1], tmp_path, 2, monkeypatch) as api:
        assert ask(api.removesuffix("/v1")) == answers_of_second[2]

"""A run on one machine listens on its loopback interface alone, and whoever reaches its ports there gets no further."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from commands import ROOT, demo_folder
from live_runs import started
from run_ranks import MARK, marked
from servers import free_port
from sockets import Listening, is_open, listening

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

SETTINGS = [
    str(ROOT / "recipes/demo-cpu.yaml"),
    *("model.path=build/demo/base", "model.dtype=bfloat16", "guard.initial_mismatch=ignore"),
    *("run.steps=2", "run.eval_every=9", "algorithm.prompts_per_step=8", "optimizer.lr=1e-5", "rollout.tp=1"),
]


def mark_of(pid: int) -> str:
    """Return the mark of a process, which has its own environment once it runs its program."""
    while True:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
        for variable in variables:
            if variable.startswith(f"{MARK}="):
                return variable.partition("=")[2]
        time.sleep(0.01)


def watch(work: Path, *settings: str, look: Callable[[set[Listening]], None] = lambda found: None) -> set[Listening]:
    """Return all sockets at which the processes of a run listen at any time.

    Args:
        look: called again and again with those that there were up to then.
    """
    found: set[Listening] = set()
    with started(work, [*SETTINGS, *settings]) as process:
        mark = mark_of(process.pid)
        while process.poll() is None:
            found |= listening(marked(mark))
            look(found)
            time.sleep(0.2)
        assert process.returncode == 0
    return found


def test_listening_sees_what_is_open() -> None:
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as here:
        found = {one.port: one for one in listening(["self"])}  # type: ignore[list-item]
        assert is_open(found[everywhere.getsockname()[1]])
        assert not is_open(found[here.getsockname()[1]])


@pytest.mark.slow  # agents run on the same ranks, too
def test_run_on_the_same_ranks_listens_on_loopback_alone(demo: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(temporary))
        found = watch(demo_folder(tmp_path, demo), "name=same", "train.tp=2", "train.pp=1")
    assert len(found) >= 3  # the store, and gloo of each rank
    assert {one for one in found if is_open(one)} == set()
    assert not list(temporary.glob("torchelastic*"))


# Reads what the store of a run has, and tries to be heard as one of its ranks, with what it has read as the secret.
THIEF = """
import encodings.idna, hashlib, hmac, os, pickle, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import connection
from datetime import timedelta
import torch.distributed as dist
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
proof, ports = sys.argv[1], list(map(int, sys.stdin.readline().split()))
told = {b""}
def read(port):
    try:
        store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
        keys = store.list_keys()
        return {store.get(key) for key in keys if "beat" not in key}, f"keys {len(keys)}"
    except Exception as error:
        return set(), f"no store at {port}: {error}"

with ThreadPoolExecutor() as threads:  # all ports at once, while the run goes on
    for values, what in threads.map(read, ports):
        told |= values
        print(what)
for value in list(told):
    for word in value.decode(errors="replace").replace('"', " ").replace(",", " ").split():
        try:
            told.add(bytes.fromhex(word))
        except ValueError:
            pass

class Payload:
    def __reduce__(self):
        return os.system, (f"id > {proof}",)

payload = pickle.dumps(Payload())
for port in ports:
    for secret in sorted(told)[:50]:
        for authenticates in (True, False):
            try:
                made = socket.create_connection(("127.0.0.1", port), 2)
                made.settimeout(2)
                if authenticates:
                    heard = made.recv(256)
                    made.sendall(os.urandom(32) + hmac.new(secret, heard, "sha256").digest())
                made.sendall(struct.pack("!i", len(payload)) + payload)
                made.close()
            except OSError:
                pass
print("tried", len(ports), len(told))
"""


def test_split_run_listens_on_loopback_alone_and_is_not_robbed(demo: Path, tmp_path: Path) -> None:
    """Whoever is on the machine can read the store; it has no secret, and nothing that is sent is unpickled."""
    work, thieves = demo_folder(tmp_path, demo), list[tuple[str, str]]()
    proof = tmp_path / "proof"
    (tmp_path / "thief.py").write_text(THIEF)
    tmp_path.chmod(0o777)  # so that anybody could write the proof
    pipe = subprocess.PIPE
    thief = subprocess.Popen(  # imports while the run starts, so that it is quick once it hears of the ports
        [sys.executable, str(tmp_path / "thief.py"), str(proof)], stdin=pipe, stdout=pipe, stderr=pipe, text=True
    )

    def steal(found: set[Listening]) -> None:
        if thieves or not (work / "runs/apart/metrics.jsonl").exists():
            return
        ports = sorted({str(one.port) for one in found if one.protocol.startswith("tcp")})
        thieves.append(thief.communicate(" ".join(ports) + "\n", timeout=300))

    more = ("train.tp=1", "train.pp=1", "roles.generation.ranks=1", "roles.reward.ranks=1", "run.steps=4")
    try:
        found = watch(work, "name=apart", *more, look=steal)
    finally:
        thief.kill()
    ((told, problems),) = thieves
    assert {one for one in found if is_open(one)} == set()
    assert "tried" in told, problems
    assert not proof.exists()
    secret = work / "runs/apart/logs/secret"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert "keys" in told, told


AGENT = """
import os, httpx
assert len(os.environ["HYBRID3D_API_KEY"]) >= 32
headers = {"authorization": "Bearer " + os.environ["HYBRID3D_API_KEY"]}
http = httpx.Client(base_url=os.environ["HYBRID3D_ENDPOINT"], headers=headers, timeout=120)
while (response := http.post("/sessions")).status_code != 410:
    if response.status_code == 200:
        session = response.json()
        asked = {"model": session["model"], "prompt": session["prompt"], "max_tokens": 4}
        http.post(f"/sessions/{session['id']}/v1/completions", json=asked).raise_for_status()
        http.post(f"/sessions/{session['id']}/end", json={"reward": 0.5}).raise_for_status()
"""


@pytest.mark.slow
def test_agents_find_the_key_and_their_endpoint_on_loopback_alone(demo: Path, tmp_path: Path) -> None:
    """Without a key in the environment one is made; a stranger on the machine gets no session."""
    work, strangers = demo_folder(tmp_path, demo), set[int]()
    (work / "agent.py").write_text(AGENT)
    port = free_port()

    def look(found: set[Listening]) -> None:
        if any(one.port == port for one in found):
            with suppress(httpx.HTTPError):  # the run has just ended
                strangers.add(httpx.post(f"http://127.0.0.1:{port}/sessions", timeout=10).status_code)

    settings = ("train.tp=1", "train.pp=1", "train.micro_batch_size=8", "algorithm.samples_per_prompt=2")
    agents = (f"rollout.agents.command={sys.executable} agent.py", f"rollout.agents.port={port}")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HYBRID3D_API_KEY", raising=False)
        found = watch(work, "name=agents", *settings, *agents, look=look)
    assert {one for one in found if is_open(one)} == set()
    assert strangers == {401}


def test_local_ray_listens_on_loopback_alone_and_leaves_nothing(demo: Path, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    work, home = demo_folder(tmp_path, demo), tmp_path / "home"
    home.mkdir()
    modes: dict[str, int] = {}

    with tempfile.TemporaryDirectory(prefix="r-", dir="/tmp") as temporary, pytest.MonkeyPatch.context() as patch:

        def look(found: set[Listening]) -> None:
            for path in (work / "runs/on-ray/ray/token", *Path(temporary).glob("ray-*/token")):
                with suppress(OSError):
                    modes[str(path)] = path.stat().st_mode & 0o777

        patch.setenv("HOME", str(home))
        patch.setenv("TMPDIR", temporary)
        found = watch(work, "name=on-ray", "train.tp=2", "train.pp=1", "--ray", "local", look=look)
        left = [path.name for path in Path(temporary).iterdir()]
    assert len(found) >= 8  # of Ray's own processes
    assert {one for one in found if is_open(one)} == set()
    assert set(modes.values()) == {0o600}
    assert not list(home.rglob("*token*"))
    assert not [name for name in left if name.startswith(("ray", "torchelastic"))]
    assert not (work / "runs/on-ray/ray").exists()

"""What every process of a run starts with."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid3d import launch_environment, patches

pytestmark = pytest.mark.processes

GROUPS = """
import os, time
import torch.distributed as dist
from hybrid3d import distributed

distributed.start(dist.HashStore())
groups = [dist.new_group([0]) for _ in range(5)] + [dist.new_group([0], backend="gloo")]
for group in groups:
    dist.barrier(group)
def loops():
    names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
    return names.count("gloo_tcp_loop")
end = time.monotonic() + 20
while not loops() and time.monotonic() < end:  # a thread takes its name when it first runs
    time.sleep(0.1)
time.sleep(0.5)
print(loops())
dist.destroy_process_group()
"""


def test_process_groups_share_one_network_thread() -> None:
    """Each of its own would wake a hundred times a second: with thirty groups a rank they are what is timed."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", GROUPS], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"


PLANTED = """
import os, sys
from datetime import timedelta
import torch.distributed as dist

class Planted:
    # leaves a folder of the rank that unpickles it
    def __reduce__(self):
        return eval, ("__import__('os').mkdir(__import__('sys').argv[2] + __import__('os').environ['RANK'])",)

if os.environ["RANK"] == "0":
    from hybrid3d import distributed, launch_environment
    launch_environment.set_secret(b"of the run")
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    group = distributed.start(store)
    ask = {
        "torch": lambda: dist.all_gather_object([None, None], 0),
        "gather": lambda: distributed.gather_objects(0, group),
        "broadcast": lambda: distributed.broadcast_object(None, group, src=1),
    }[sys.argv[3]]
    try:
        print(ask())
    except RuntimeError as error:
        print(type(error).__name__, error)
else:
    store = dist.PrefixStore("default", dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
    dist.init_process_group("gloo", store=store, rank=1, world_size=2, timeout=timedelta(seconds=30))
    import pickle, torch
    data = torch.frombuffer(bytearray(pickle.dumps(Planted())), dtype=torch.uint8)
    try:
        if sys.argv[3] == "torch":
            dist.all_gather_object([None, None], Planted())
        elif sys.argv[3] == "broadcast":
            dist.broadcast(torch.tensor(len(data)), src=1)
            dist.broadcast(data, src=1)
        else:
            sizes = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
            dist.all_gather(sizes, torch.tensor([len(data)]))
            width = max(int(size) for size in sizes)
            padded = torch.cat([data, torch.zeros(width - len(data), dtype=torch.uint8)])
            dist.all_gather([torch.empty_like(padded) for _ in range(2)], padded)
    except Exception:
        pass  # what it reads of rank 0 is not for it
"""


@pytest.mark.parametrize("collective", ["torch", "gather", "broadcast"])
def test_objects_from_processes_without_the_secret_are_not_unpickled(collective: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    planted = tmp_path / "planted"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PLANTED, str(port), str(planted), collective],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=90)[0] for rank in ranks]
    assert printed[0].startswith("ForeignObject ")
    assert "does not know this run's secret" in printed[0]
    assert not (tmp_path / "planted0").exists()


def test_objects_of_a_run_are_read_only_by_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_environment, "_secret", b"of the run")
    sent = patches.pickled({"a": [1, 2]})
    assert patches.unpickled(sent) == {"a": [1, 2]}
    changed = sent.clone()
    changed[5] ^= 1
    for bad in (changed, sent[:-1], sent[:0]):
        with pytest.raises(patches.ForeignObject):
            patches.unpickled(bad)
    monkeypatch.setattr(launch_environment, "_secret", b"of another run")
    with pytest.raises(patches.ForeignObject):
        patches.unpickled(sent)

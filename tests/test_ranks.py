"""What every process of a run starts with."""

import os
import subprocess
import sys

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


def test_all_groups_of_a_process_share_one_thread_for_the_network() -> None:
    """Each of its own would wake a hundred times a second: with thirty groups a rank they are what is timed."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run([sys.executable, "-c", GROUPS], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1\n"

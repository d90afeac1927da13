"""A rank that meets the others, adds its number to theirs, and prints where its processes listen.

python joined.py
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hybrid3d import distributed, launch_environment
from hybrid3d.launch import rendezvous
from sockets import listening

launch_environment.validate()
store = rendezvous.meet({})
group = distributed.start(store)
total = torch.tensor(launch_environment.rank() + 1)
dist.all_reduce(total, group=group)
found = sorted({one.address for one in listening([os.getpid()]) if one.protocol.startswith("tcp")})
print(json.dumps({"total": int(total), "listens": found, "reached": launch_environment.own_address()}), flush=True)
dist.barrier()

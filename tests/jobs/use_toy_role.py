"""The first rank asks the others, which have a toy role, and writes what they say.

torchrun --nproc-per-node 3 use_toy_role.py ANSWER.json
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from commands import ROOT
from hybrid3d import launch_environment
from hybrid3d.config import Recipe, load_recipe
from hybrid3d.launch import rendezvous
from hybrid3d.ledger import RankStart, wait_for_all
from hybrid3d.process import this_process
from hybrid3d.workers.loop import ROLES, WorkerServer, run_worker
from toys.echo_role import ROLE, Echoes


class WithEchoes(Recipe):
    """A recipe whose first rank trains; all others have the toy role, each by itself."""

    @property
    def role_ranks(self) -> dict[str, range]:
        return {"train": range(1), "echo": range(1, launch_environment.world_size())}

    @property
    def train_ranks(self) -> int:
        return 1

    def worker_group_size(self, role: str) -> int:
        return 1


ROLES["echo"] = ROLE
launch_environment.set_secret(b"of this test")
store, rank, made = rendezvous.meet({}), launch_environment.rank(), load_recipe(ROOT / "recipes/demo-cpu.yaml")
recipe = WithEchoes(**{field.name: getattr(made, field.name) for field in fields(made) if field.init})
if rank == 0:
    events = list[Any]()
    record = SimpleNamespace(event=lambda *told, **more: events.append(told))
    server = WorkerServer(recipe, store, record, start=0)  # type: ignore[arg-type]
    echoes = cast(Echoes, server.roles["echo"])
    said = [sorted(echoes.ask(texts)) for texts in (["a", "four"], [])]
    busy = sorted(server.lap_busy_seconds())
    server.close()
    Path(sys.argv[1]).write_text(json.dumps([said, busy, events]))
else:
    run_worker(recipe, RankStart(rank, store, None, this_process()))
wait_for_all(store, rank, launch_environment.world_size())

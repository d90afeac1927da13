"""Runs a rank that does not train in a child process, again when it is lost: the run goes on meanwhile."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from hybrid3d import ledger
from hybrid3d.config import Recipe
from hybrid3d.launch import rendezvous
from hybrid3d.launch.policies import Over, ServingPolicy
from hybrid3d.launch.rank_host import RankHost, become_parent
from hybrid3d.launch_environment import BEAT_SECONDS, State, rank
from hybrid3d.process import kill_descendants
from hybrid3d.run import terminal
from hybrid3d.run.ends import read_end
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.terminal import print_error


class RunEnd:
    """Whether the run has ended, as a thread finds out once it is asked to.

    Attributes:
        has_come: it has ended.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="end of the run", daemon=True)
        self.has_come = False

    def begin(self) -> None:
        """Begin to wait for it, the first time."""
        if self._thread.ident is None:
            self._thread.start()

    def _watch(self) -> None:
        self.wait()
        self.has_come = True

    def wait(self) -> None:
        """Wait until the run has ended, or the store of it is gone."""
        with suppress(dist.DistError, rendezvous.RendezvousError):
            store = rendezvous.connect("ranks")
            while not ledger.has_ended(store):
                time.sleep(BEAT_SECONDS)


def run_serving_rank(recipe: Recipe, folder: RunFolder, launched: bool) -> int:
    """Run this rank's command as a child process, again each time it is lost, until it ends; return the exit code.

    Args:
        launched: whether hybrid3d's own launcher reports the failure that ends the run.
    """
    become_parent()
    role, host, run_end = recipe.role_of(rank()), RankHost(tells=True), RunEnd()
    policy, why = ServingPolicy(rank(), role, getattr(recipe.roles, role).max_restarts), ""

    def has_ended(states: bytes) -> bool:
        if State.CONNECTED.value in states:  # there is a store that knows
            run_end.begin()
        return run_end.has_come

    while True:
        host.start(why)
        exit = host.wait(has_ended)
        kill_descendants()
        what = policy.after(exit, read_end(folder, rank()), run_end.has_come)
        if isinstance(what, Over):
            break
        with suppress(OSError):
            folder.failure_path(rank()).unlink()
        time.sleep(what.pause)
        why = what.why
    if what.end is not None and not (what.end.write(folder) and launched) and not what.end.peer:
        print_error(terminal.plain_console(file=sys.stderr), what.end.message(folder))
    return what.code

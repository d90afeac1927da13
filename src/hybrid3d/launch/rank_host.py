"""Runs a rank in child processes, one after another, and outlives them: starts one, waits for it, ends what it leaves.

A rank that does not train is started again when it is lost, and the run goes on meanwhile. When one of the ranks that
train is lost, the others end too, and all of them are started again, if others than they generate: they go on from the
last checkpoint, and the others, whose engines are up, register with them. `policies` decide what follows an end.

A child that serves tells through its standard output, which is a pipe, that it is alive and what state it has reached;
one that does not is killed.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import torch.distributed as dist
from msgspec.structs import replace

from hybrid3d import ledger
from hybrid3d.config import Recipe, recipe_to_ascii
from hybrid3d.launch import rendezvous
from hybrid3d.launch.policies import STOPPED, Decision, Exit, Over, ServingPolicy, decide_training
from hybrid3d.launch_environment import (
    ANSWER_SECONDS,
    BEAT_SECONDS,
    CHECKED,
    CLOSE_SECONDS,
    DECIDED_SECONDS,
    DECISION_SECONDS,
    EXIT_SECONDS,
    PARENT,
    START_SECONDS,
    State,
    heartbeat_seconds,
    local_rank,
    rank,
    recipe_variable,
    run_id,
)
from hybrid3d.ledger import TrainingAttempts
from hybrid3d.process import (
    FAILURE,
    MAX_FAILURE_TEXT,
    RESTART_COUNT,
    adopt_orphans,
    kill_descendants,
    kill_when_parent_exits,
    remove_shared_memory,
)
from hybrid3d.run import terminal
from hybrid3d.run.ends import find_root_cause, read_end
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.terminal import print_error

logger = logging.getLogger(__name__)


def become_parent() -> None:
    """Prepare this process, which runs a rank in child processes: what they leave ends with it."""
    kill_when_parent_exits()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the child dies with it


class RankHost:
    """What runs a rank in child processes of this one, which has become their parent."""

    def __init__(self, tells: bool, **variables: str):
        """`tells` says whether the children, which have these variables, tell that they are alive."""
        self._tells, self._variables, self._starts = tells, variables, 0

    def start(self, failure: str = "") -> None:
        """Start this process's command as the child that runs the rank; `failure` says why the one before has ended."""
        told = {RESTART_COUNT: str(self._starts), PARENT: str(os.getpid()), CHECKED: "1"}  # the checks are done
        told |= self._variables
        if self._tells:
            told[FAILURE] = failure.replace("\0", "")[:MAX_FAILURE_TEXT].encode(errors="backslashreplace").decode()
        self._child = _start(told, subprocess.PIPE if self._tells else None)
        self._starts += 1
        self._states, self._ready_at = b"", math.inf

    def wait(self, is_over: Callable[[bytes], bool], poll_seconds: float = BEAT_SECONDS) -> Exit:
        """Wait until the child has exited. What it leaves is for `kill_descendants`.

        It is killed if it does not tell for too long that it is alive, and soon if nothing more is expected of it.

        Args:
            is_over: whether that is so, by the states that it has told; asked every `poll_seconds`.
        """
        silent, over, killed = 0.0, False, False
        before = time.monotonic()
        while self._child.poll() is None:
            heard = self._listen(poll_seconds)
            now = time.monotonic()
            passed, before = min(now - before, 2 * poll_seconds), now  # not the time in which both were suspended
            silent = 0.0 if heard else silent + passed
            if State.READY.value in self._states:
                self._ready_at = min(self._ready_at, now)
            if not over and is_over(self._states):
                over, silent = True, 0.0
            if silent > (EXIT_SECONDS if over else self._patience):
                self._child.kill()
                killed = over
        code = STOPPED if killed else self._child.wait()
        while self._listen(0.0):
            pass
        if self._child.stdout is not None:
            self._child.stdout.close()
        return Exit(code, self._states, max(0.0, time.monotonic() - self._ready_at))

    @property
    def _patience(self) -> float:
        if not self._tells:
            return math.inf
        return heartbeat_seconds() if self._ready_at < math.inf else max(heartbeat_seconds(), START_SECONDS)

    def _listen(self, seconds: float) -> bool:
        """Wait for what the child tells, or for its end, for so long at most; return whether it has told something."""
        if self._child.stdout is None:
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
            return False
        poll = select.poll()
        poll.register(self._child.stdout, select.POLLIN | select.POLLHUP)
        if not poll.poll(1000 * seconds):
            return False
        data = os.read(self._child.stdout.fileno(), 4096)
        if not data:
            self._child.wait()
        self._states += data.replace(State.ALIVE.value, b"")
        return bool(data)


def _start(variables: dict[str, str], stdout: int | None) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hybrid3d", *sys.argv[1:]]
    return subprocess.Popen(command, env=os.environ | variables, stdout=stdout)


class RunEnd:
    """Whether the run has ended (`has_come`), as a thread finds out once it is asked to."""

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._watch, name="end of the run", daemon=True)
        self._stopped = threading.Event()
        self.has_come = False

    def begin(self) -> None:
        """Begin to wait for it, the first time."""
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Stop the thread, because one that returned from the store during interpreter shutdown would abort it."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(ANSWER_SECONDS)

    def _watch(self) -> None:
        self.wait()
        self.has_come = True

    def wait(self) -> None:
        """Wait until the run has ended, or the store of it is gone."""
        with suppress(dist.DistError, rendezvous.RendezvousError):
            store = rendezvous.connect("ranks")
            while not self._stopped.is_set() and not ledger.has_ended(store):
                self._stopped.wait(BEAT_SECONDS)


def _host(recipe: Recipe, tells: bool) -> RankHost:
    return RankHost(tells, **recipe_variable(recipe_to_ascii(recipe)))


def run_serving_rank(recipe: Recipe, folder: RunFolder, launched: bool) -> int:
    """Run this rank's command as a child process, again each time it is lost, until it ends; return the exit code.

    If it was `launched`, hybrid3d's own launcher reports the failure that ends the run.
    """
    become_parent()
    role, host, run_end = recipe.role_of(rank()), _host(recipe, tells=True), RunEnd()
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
    run_end.stop()
    if what.end is not None and not (what.end.write(folder) and launched) and not what.end.peer:
        print_error(terminal.plain_console(file=sys.stderr), what.end.message(folder))
    return what.code


def run_training_rank(recipe: Recipe, folder: RunFolder, launched: bool) -> int:
    """Run this rank's command as a child process, again each time that a rank that trains is lost, until it ends.

    Arguments and result are as for `run_serving_rank`.
    """
    become_parent()
    host, stderr = _host(recipe, tells=False), terminal.duplicate_console(2)
    if rank() > 0:
        host.start()
    try:
        with rendezvous.silenced_stderr():
            store = rendezvous.connect("ranks")  # this process has it if it is that of rank 0 and no agent has it
    except rendezvous.RendezvousError as error:
        if rank() > 0:
            code = host.wait(lambda states: False).code  # it has tried the same, and reports it
            return code if code >= 0 else 1
        if not error.reported_by_rank_0 and local_rank() == 0:
            print_error(stderr, f"{recipe.name}: {error}")
        return error.code
    if rank() == 0:
        host.start()
    starts, restarts = TrainingAttempts(store, recipe.world_size), 0
    for start in itertools.count():
        code = _wait(host, starts, start)
        no_answer = threading.Timer(DECIDED_SECONDS, os._exit, [1])
        no_answer.daemon = True
        no_answer.start()
        try:
            if code == 0 or (code > 0 and not rendezvous.have_met(store)):
                with suppress(dist.DistError):  # rank 0 may have ended before
                    starts.report_end(start, rank(), code)
                return code
            starts.fail(start)
            kill_descendants()
            ledger.forget_beat(store, rank())  # the next one comes after a start, which takes longer
            starts.report_end(start, rank(), code)
            if rank() > 0:
                again = starts.is_there_another(start, DECISION_SECONDS)
            else:
                codes = starts.await_ends(start, recipe.role_ranks["train"], CLOSE_SECONDS)
                decision = _decide(recipe, folder, codes, restarts, ledger.has_ended(store), launched)
                restarts += decision.counts
                again = decision.again
                starts.decide(start, again)
        except dist.DistError as error:  # the store is gone, and with it rank 0's node
            again = False
            if not launched and local_rank() == 0:
                print_error(stderr, find_root_cause(folder, {rank(): code}).message(folder))
                logger.error("%s", error)
        no_answer.cancel()
        if not again:
            break
        with suppress(OSError):
            folder.failure_path(rank()).unlink()
        host.start()
    remove_shared_memory(run_id())
    return max(code, 1)


def _wait(host: RankHost, starts: TrainingAttempts, start: int) -> int:
    """Wait until this rank's process of a start has ended, soon if another rank is lost; return its exit code."""
    failed, ended = threading.Event(), threading.Event()

    def watch() -> None:
        with suppress(dist.DistError):
            while not ended.is_set() and not starts.has_failed(start):
                ended.wait(starts.poll_seconds)
            failed.set()

    watching = threading.Thread(target=watch, name="starts", daemon=True)  # the store may be stopped and never answer
    watching.start()
    code = host.wait(lambda states: failed.is_set(), starts.poll_seconds).code
    ended.set()
    watching.join(ANSWER_SECONDS)  # as in `RunEnd.stop`
    return code


def _decide(
    recipe: Recipe, folder: RunFolder, codes: dict[int, int], restarts: int, run_has_ended: bool, launched: bool
) -> Decision:
    """Print the cause and what follows from it; if nothing does, leave that to the launcher if there is one."""
    ranks, most = recipe.role_ranks["train"], recipe.run.max_restarts
    cause = find_root_cause(folder, {number: code for number, code in codes.items() if code}, ranks)
    decision = decide_training(cause, codes, ranks, restarts, most, run_has_ended)
    console = terminal.plain_console(file=sys.stdout if decision.again else sys.stderr)
    reported = not decision.again and replace(cause, final=decision.final).write(folder)
    if not (reported and launched):
        print_error(console, cause.message(folder))
    if decision.again:
        counted = f" ({restarts + 1} of run.max_restarts={most})" if decision.counts else ""
        print_error(console, f"starting the ranks that train again, from the last checkpoint{counted}")
    return decision

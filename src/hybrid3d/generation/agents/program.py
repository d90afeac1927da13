"""The agent's program, which a recipe names and a rank starts beside its endpoint."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

from hybrid3d.config import Agents

# Becomes the program, which must not outlive the rank
_START = (
    "import os, sys; from hybrid3d.process import kill_when_parent_exits as k; "
    "k(int(sys.argv[1])); os.execvp(sys.argv[2], sys.argv[2:])"
)
KEY_VARIABLE = "HYBRID3D_API_KEY"
LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")
URL_VARIABLE = "HYBRID3D_ENDPOINT"
GRACE_SECONDS = 5  # for it to end by itself, when it is told that the run has ended


class AgentFailed(RuntimeError):
    """The agent's program has ended before the run."""


def find_agent_problems(settings: Agents) -> list[str]:
    """Return why agents cannot be started on this machine, or why others than they could use the endpoint."""
    problems = []
    if settings.command is not None:
        try:
            program = shlex.split(settings.command)[0]
        except (ValueError, IndexError) as error:
            problems.append(f"rollout.agents.command={settings.command!r} is no command: {error}")
        else:
            if shutil.which(program, path=_search_path()) is None:
                problems.append(f"rollout.agents.command: there is no program {program!r}: give its path")
    if settings.host not in LOCAL_HOSTS and not os.environ.get(KEY_VARIABLE):
        reason = f"other machines can reach it, so that agents need a key: set the environment variable {KEY_VARIABLE}"
        problems.append(f"rollout.agents.host={settings.host}: {reason}")
    return problems


def _search_path() -> str:
    """Return where programs are looked for: first in the environment that this process runs in."""
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])


class AgentProgram:
    """A running program. Its output goes to the log of the rank."""

    def __init__(self, command: str, url: str, key: str):
        """
        Args:
            key: of the endpoint; the program finds it in its environment, where only its own user can read it.
        """
        self._command = command
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *shlex.split(command)],
            env=os.environ | {URL_VARIABLE: url, KEY_VARIABLE: key, "PATH": _search_path()},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # with what it starts itself
        )

    def check(self) -> None:
        """Raise AgentFailed if it has ended."""
        code = self._process.poll()
        if code is not None:
            problem = f"rollout.agents.command={self._command!r} ended with exit code {code} before the run did"
            raise AgentFailed(f"{problem}: its output is in the log of this rank; it must ask for sessions until 410")

    def close(self) -> None:
        """Wait a moment for it to end, and kill it otherwise."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also those that it has started
        self._process.wait()

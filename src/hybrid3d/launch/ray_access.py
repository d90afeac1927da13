"""What Ray is to know before it is imported: where it listens, by which token it knows its own, and where it writes.

Ray reads these variables when it is imported, so this module does not import it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from hybrid3d.run.folder import RunFolder

# A switch that is meant for other systems: Ray, of which all sockets listen on all interfaces, then takes loopback
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
STATISTICS = "RAY_USAGE_STATS_ENABLED"
MAX_FOLDER_BYTES = 42  # of a path that leaves room for the names of Ray's sockets below it, which are short by nature


@contextmanager
def ray_access(address: str, folder: RunFolder) -> Iterator[Path | None]:
    """Set Ray's variables for a command; on exit, remove what a local cluster has written.

    The address is as for `launch_on_ray`. Yields the folder of a local cluster; None for another one.
    """
    variables = {STATISTICS: os.environ.get(STATISTICS, "0")}
    if address != "local":
        if find_token() and MODE not in os.environ:  # `ray start` turns tokens on where there is one
            variables[MODE] = "token"
        with mock.patch.dict(os.environ, variables):
            yield None
        return
    files = _make_folder(folder)
    try:
        path = files / "token"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        variables |= {**LOOPBACK_ONLY, MODE: "token", TOKEN_PATH: str(path)}
        with mock.patch.dict(os.environ, variables):
            os.environ.pop(TOKEN, None)  # it would go before the file
            yield files
    finally:
        shutil.rmtree(files, ignore_errors=True)


def find_token() -> str:
    """Return where Ray's token for this user is, as it is looked for by Ray; empty if there is none."""
    if os.environ.get(TOKEN):
        return f"the environment variable {TOKEN}"
    path = Path(os.environ.get(TOKEN_PATH) or Path.home() / ".ray" / "auth_token")
    return str(path) if path.is_file() else ""


def _make_folder(folder: RunFolder) -> Path:
    """Return an empty folder for a local cluster, in that of the run if its path is short enough for sockets."""
    files = folder.path.resolve() / "ray"
    shutil.rmtree(files, ignore_errors=True)  # of a start that was killed
    if len(os.fsencode(files)) > MAX_FOLDER_BYTES:
        return Path(tempfile.mkdtemp(prefix="ray-"))
    files.mkdir(mode=0o700, parents=True)
    return files

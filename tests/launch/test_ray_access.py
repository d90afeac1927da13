"""What Ray is told before it is imported: where to listen, by which token, where to write; and what nodes are told."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from hybrid3d.launch.ray_access import MAX_FOLDER_BYTES, find_token, ray_access
from hybrid3d.run.folder import RunFolder

VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED")


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def own_token(home: Path) -> Path:
    path = home / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text("0" * 32)
    return path


def test_local_cluster_has_its_own_token_and_listens_on_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")  # short, unlike that of a test
    mine = own_token(tmp_path)
    with ray_access("local", RunFolder(tmp_path / "run")) as files:
        assert files is not None
        assert len(os.fsencode(files)) <= MAX_FOLDER_BYTES
        assert os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
        assert (os.environ["RAY_AUTH_MODE"], os.environ["RAY_USAGE_STATS_ENABLED"]) == ("token", "0")
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        assert token.parent == files
        assert [path.stat().st_mode & 0o777 for path in (token, files)] == [0o600, 0o700]
        assert len(token.read_text()) == 64
    assert not files.exists()
    assert mine.read_text() == "0" * 32
    assert not any(name in os.environ for name in VARIABLES)


def test_short_path_of_the_run_s_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what an earlier start has left there is removed."""
    folder = Path("/tmp") / f"h3d-{os.getpid()}"
    (folder / "ray" / "left").mkdir(parents=True)
    try:
        with ray_access("local", RunFolder(folder)) as files:
            assert files == folder / "ray"
            assert [path.name for path in files.iterdir()] == ["token"]
        assert not files.exists()
    finally:
        folder.rmdir()


@pytest.mark.parametrize("where", ["home", "path", "variable", ""])
def test_token_of_another_cluster_is_used_where_there_is_one(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ray start` turns tokens on there; Ray itself would not, and fail without a cause."""
    expected = ""
    if where == "home":
        expected = str(own_token(tmp_path))
    elif where == "path":
        (tmp_path / "token").write_text("1" * 32)
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", expected := str(tmp_path / "token"))
    elif where == "variable":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "2" * 32)
        expected = "the environment variable RAY_AUTH_TOKEN"
    assert find_token() == expected
    with ray_access("node-a:6379", RunFolder(tmp_path / "run")) as files:
        assert files is None
        assert os.environ.get("RAY_AUTH_MODE") == ("token" if where else None)
        assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # the user's own word counts
    with ray_access("auto", RunFolder(tmp_path / "run")):
        assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_user_variables_for_libraries_reach_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from hybrid3d.launch.ray_cluster import user_variables

    given = {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0", "UCX_TLS": "rc", "HF_HOME": "/data/hf"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("PATH_OF_THIS_MACHINE", "x")
    found = user_variables()
    assert given.items() <= found.items()
    assert not {"CUDA_VISIBLE_DEVICES", "PATH_OF_THIS_MACHINE", "PATH", "HOME"} & found.keys()

"""Tests reading a launcher's environment variables, and that invalid ones are refused by name."""

from __future__ import annotations

import os

import pytest

from hybrid3d import launch_environment
from hybrid3d.errors import UserMistake, escape_control_characters

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [name for name in os.environ if name.startswith(("SLURM_", "HYBRID3D_"))]
    for name in (*NAMES, *ours):
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)


def test_environment_without_launcher_has_defaults() -> None:
    launch_environment.validate()
    assert not launch_environment.under_launcher()
    assert launch_environment.rendezvous_seconds() == 300
    assert launch_environment.local_rank() == 0


def test_variables_are_read_as_torchrun_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    given |= {"MASTER_ADDR": "node-0.cluster", "MASTER_PORT": "29500", "HYBRID3D_RENDEZVOUS_SECONDS": "2.5"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    launch_environment.validate()
    assert launch_environment.under_launcher()
    assert launch_environment.rank() == 5
    assert launch_environment.world_size() == 8
    assert launch_environment.local_rank() == 1
    assert launch_environment.local_world_size() == 4
    assert launch_environment.master_address() == ("node-0.cluster", 29500)
    assert launch_environment.run_id() == "run-node-0.cluster-29500"
    monkeypatch.setenv("MASTER_ADDR", "fe80::1")
    assert launch_environment.run_id() == "run-fe80__1-29500"
    assert launch_environment.rendezvous_seconds() == 2.5
    monkeypatch.setenv("HYBRID3D_RUN", "hybrid3d-7-0")
    assert launch_environment.run_id() == "hybrid3d-7-0"
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    launch_environment.validate()
    assert launch_environment.local_world_size() == 8
    for address in ("127.0.0.1", "::1", "[fe80::1%eth0]", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert launch_environment.master_address()[0] == address


def test_shell_on_a_node_of_slurm_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"JOB_ID": "7", "NTASKS": "5", "STEP_ID": "0", "STEP_NUM_TASKS": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    launch_environment.validate()
    assert not launch_environment.under_launcher()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2: expected an integer from 0 to 1, because WORLD_SIZE=2"),
        ({"RANK": "0"}, "WORLD_SIZE is not set, expected an integer from 1 to 1,048,576: the launcher sets it"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x: expected an integer from 0 to 1, because WORLD_SIZE=2"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK='': expected an integer from 0 to 1, because WORLD_SIZE=2"),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4: RANK is not set: unset this too, or start with torchrun or srun, which set both",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2: expected an integer from 0 to 1, because LOCAL_WORLD_SIZE=2",
        ),
        ({"HYBRID3D_RUN": "*"}, "HYBRID3D_RUN=*: not a valid name of a run, expected 1 to 100 letters"),
        ({"HYBRID3D_RENDEZVOUS_SECONDS": "nan"}, "HYBRID3D_RENDEZVOUS_SECONDS=nan: expected seconds, from 0.001 to"),
        (
            {"SLURM_STEP_ID": "0"},
            "SLURM_STEP_NUM_TASKS is not set, expected an integer from 1 to 1,048,576: srun sets it",
        ),
    ],
)
def test_validate_refuses_invalid_variables(
    given: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserMistake) as caught:
        launch_environment.validate()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", ["1", "2", "true"])
def test_groups_of_vllm_that_ignore_the_placement_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", value)
    with pytest.raises(UserMistake, match=f"^VLLM_DISTRIBUTED_USE_SPLIT_GROUP={value}: .*: unset it$"):
        launch_environment.check_vllm_variables()


def test_vllm_s_first_model_runner_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UserMistake, match=r"^VLLM_USE_V2_MODEL_RUNNER=0: .*: unset it$"):
        launch_environment.check_vllm_variables()


def test_values_of_vllm_variables_that_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launch_environment.check_vllm_variables()
    monkeypatch.setenv("VLLM_DISTRIBUTED_USE_SPLIT_GROUP", "0")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    launch_environment.check_vllm_variables()


def test_escape_control_characters_shows_what_a_terminal_would_act_upon() -> None:
    assert escape_control_characters("a\tb\nc 日本 🚀 é") == "a\tb\nc 日本 🚀 é"
    assert (
        escape_control_characters("\x1b[31m\x07\x00\x9b\ud800\u202e\u200b\u2028\r")
        == r"\x1b[31m\x07\x00\x9b\ud800\u202e\u200b\u2028\r"
    )


@pytest.mark.parametrize("host", ["node1..lan", ".lan", "n" * 64])
def test_name_that_cannot_be_looked_up_is_no_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserMistake, match="is not a host: set it to a host's name or address on all ranks"):
        launch_environment.master_address()
    assert not launch_environment.is_loopback(host)
    with pytest.raises(OSError, match="not a host's name"):
        launch_environment.source_address(host)


@pytest.mark.parametrize("host", ["node1.lan", "node1.lan.", "::1", "fe80::1%eth0", "127.0.0.1", "bücher"])
def test_names_and_addresses_are_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": host, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert launch_environment.master_address() == (host, 29500)

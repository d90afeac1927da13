"""Training and generation on different ranks: the metrics of the same ranks, bit for bit, from checkpoint to export."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, demo_folder, hybrid3d, read_events, read_rows, without
from live_runs import child_of, ranks_of, ray_cluster, recorded, started, wait_for_rows, wait_until
from reference import save_classifier

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

# Which depend on the ranks that have weights already
OF_TRAFFIC = (
    *("sync/received_bytes", "sync/lower_bound_bytes", "sync/network_bytes", "sync/network_bound_bytes"),
    *(
        "sync/delta_bytes",
        "sync/delta_bound_bytes",
        "sync/max_staging_bytes",
        "sync/max_finalize_bytes",
        "sync/max_lent_bytes",
    ),
)
OF_RESUME = (*OF_TRAFFIC, "sync/dense", "sync/changed_fraction")  # what has changed is not known after a start
REWARDS = """
def parity(answer, reference, prompt):
    return float(sum(answer.encode()) % 2)


def none(answer, reference, prompt):
    raise ValueError("no reward today")
"""
NO_RESTART = "roles.generation.max_restarts=0"
SPLIT = ["name=split", "sync.verify=always", "roles.generation.ranks=2", "machine.gpus_per_node=2"]


def settings(*more: str) -> list[str]:
    return [
        str(ROOT / "recipes/demo-cpu.yaml"),
        *("model.path=build/demo/base", "model.dtype=bfloat16", "rollout.pack_weights=false", "sync.delta=always"),
        *("guard.initial_mismatch=ignore", "reward.name=rewards:parity"),
        *("train.tp=2", "train.pp=1", "rollout.tp=1"),
        *(
            "run.steps=3",
            "run.eval_every=3",
            "run.checkpoint_every=2",
            "algorithm.prompts_per_step=16",
            "optimizer.lr=1e-5",
        ),
        *more,
    ]


@pytest.fixture(scope="module")
def work(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs of the same seed: on two ranks, and on two that train and two that generate."""
    work = demo_folder(tmp_path_factory.mktemp("split"), demo)
    (work / "rewards.py").write_text(REWARDS)
    train(work, "name=colocated", "debug.placement=consecutive")
    train(work, *SPLIT)
    return work


def train(work: Path, *more: str, expect: int = 0) -> str:
    return hybrid3d(work, "train", *settings(*more), expect=expect, also=work)


def test_split_and_colocated_runs_learn_the_same(work: Path) -> None:
    together, apart = (without(read_rows(work / "runs" / name), *OF_TRAFFIC) for name in ("colocated", "split"))
    assert len(together) == 4
    assert together == apart
    together, apart = ((work / "runs" / name / "samples.jsonl").read_text() for name in ("colocated", "split"))
    assert together == apart


def test_sync_bytes_are_received_once_and_enter_the_node_once(work: Path) -> None:
    rows = read_rows(work / "runs/split")
    dense, sparse = rows[0], rows[1:]
    assert dense["sync/dense"] == 1
    assert dense["sync/received_bytes"] == dense["sync/lower_bound_bytes"] > 0
    # Both ranks that generate want all of the model, and one copy of it enters their node.
    assert dense["sync/network_bytes"] == dense["sync/network_bound_bytes"] == dense["sync/received_bytes"] / 2
    assert [row["sync/dense"] for row in sparse] == [0, 0, 0]
    for row in sparse:
        assert 0 < row["sync/delta_bytes"] < dense["sync/received_bytes"] / 3


def test_nearly_all_of_a_step_is_in_its_timeline(work: Path) -> None:
    trace = json.loads((work / "runs/split/timeline.json").read_text())
    events, rows = trace["traceEvents"], read_rows(work / "runs/split")
    assert trace["otherData"] == {"step": 2}
    assert {(event["pid"], event["tid"]) for event in events} == {
        *(("train", 0), ("train", 1)),
        *(("generation", 2), ("generation", 3)),
    }
    length = max(event["ts"] + event["dur"] for event in events)
    for rank in range(4):
        spans = sorted((event["ts"], event["dur"]) for event in events if event["tid"] == rank)
        assert sum(duration for _, duration in spans) > 0.95 * length
        assert all(one[0] + one[1] <= other[0] + 1e3 for one, other in itertools.pairwise(spans))
    row = rows[2]
    assert 0 < row["time/training_busy"] < row["time/step"]
    assert 0 < row["time/generation_busy"] < row["time/step"]


def test_checkpoint_is_evaluated_and_exported(work: Path) -> None:
    accuracy = read_rows(work / "runs/split")[-1]["eval/accuracy"]
    printed = hybrid3d(work, "eval", "runs/split", also=work)
    assert f"step 3: held-out accuracy {accuracy:.4f}" in printed
    hybrid3d(work, "export", "runs/split", "out")  # by the ranks that train
    assert (work / "out/model.safetensors").stat().st_size > 0


AHEAD = [*SPLIT, "algorithm.correction.kind=truncate"]


def test_generation_runs_ahead_within_its_bound(work: Path) -> None:
    """The prompts of each step are those of the other runs, and weights are older by what the bound allows."""
    train(work, *AHEAD, "name=ahead", "async.max_staleness=1")
    rows = read_rows(work / "runs/ahead")
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]
    assert [row["rollout/staleness_mean"] for row in rows] == [0, 1, 1, 1]
    ahead, together = (samples_of(work / "runs" / name) for name in ("ahead", "colocated"))
    assert [sample["weights"] for sample in ahead] == [max(0, sample["step"] - 1) for sample in ahead]
    assert [sample["prompt"] for sample in ahead] == [sample["prompt"] for sample in together]
    first = [sample["answer"] for sample in together if sample["step"] == 0]
    assert [sample["answer"] for sample in ahead if sample["step"] == 0] == first


@pytest.mark.slow
def test_sync_that_begins_during_the_last_update_is_the_same(work: Path) -> None:
    """Also after a step that updates only the critic, in which there is no update of the policy to begin with."""
    ppo = ("algorithm.name=ppo", "critic.warmup_steps=1", "model.dtype=float32", "run.checkpoint_every=0")
    for name, overlap in (("overlapped", "true"), ("in-turn", "false")):
        train(work, *SPLIT, *ppo, f"name={name}", f"sync.overlap={overlap}")
    overlapped, in_turn = (read_rows(work / "runs" / name) for name in ("overlapped", "in-turn"))
    assert "train/loss" not in overlapped[0]
    assert "train/loss" in overlapped[1]
    assert without(overlapped) == without(in_turn)
    for row in overlapped[2:]:
        assert row["sync/received_bytes"] == row["sync/lower_bound_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 2, 4])
def test_ten_thousand_samples_are_within_the_bound(work: Path, bound: int) -> None:
    name, steps = f"ahead-{bound}", 79
    more = (f"name={name}", f"async.max_staleness={bound}", f"run.steps={steps}", "run.eval_every=79")
    train(work, *AHEAD, *more, "run.checkpoint_every=0")
    rows = read_rows(work / "runs" / name)
    assert len(rows) * 16 * 8 >= 10_000
    assert 0 < max(row["rollout/staleness_max"] for row in rows) <= bound
    assert all(
        sample["step"] - bound <= sample["weights"] <= sample["step"] for sample in samples_of(work / "runs" / name)
    )


REWARDS_APART = ("roles.reward.ranks=1", "machine.gpus_per_node=4")


@pytest.mark.slow
def test_rewards_go_on_when_ranks_that_compute_them_are_killed(work: Path) -> None:
    """Here the ranks that train also generate: the metrics are those of the run whose ranks do all."""
    run, more = work / "runs/rewards-apart", ("name=rewards-apart", "debug.placement=consecutive", *REWARDS_APART)
    with started(work, settings(*more)) as process:
        wait_for_rows(run, 1, process)
        child = child_of(run, 2)
        assert child is not None
        os.kill(child, signal.SIGKILL)
        printed, _ = process.communicate(timeout=200)
        assert process.returncode == 0
    assert not ranks_of(run)
    assert "rank 2 lost: 0 of 1 groups can compute rewards, and its ranks are started again" in printed
    assert "rank 2 computes rewards again after it was lost: killed by SIGKILL" in printed
    assert without(read_rows(run)) == without(read_rows(work / "runs/colocated"))
    events = json.loads((run / "timeline.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["pid"] == "reward"} >= {"reward", "wait"}


@pytest.mark.slow
def test_reward_ranks_stay_up_while_training_and_generation_ranks_restart(work: Path) -> None:
    run = work / "runs/rewards-again"
    more = ("name=rewards-again", "rollout.tp=2", *REWARDS_APART, "run.max_restarts=1")
    train(work, "name=once", "rollout.tp=2")
    with started(work, settings(*more)) as process:
        wait_for_rows(run, 3, process)  # a checkpoint is there
        child = child_of(run, 1)
        assert child is not None
        os.kill(child, signal.SIGKILL)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
    assert "starting the ranks that train again, from the last checkpoint (1 of run.max_restarts=1)" in printed
    assert not engine_events(run, "lost")
    assert "reward_worker_lost" not in (run / "events.jsonl").read_text()
    assert without(read_rows(run), *OF_RESUME) == without(read_rows(work / "runs/once"), *OF_RESUME)


@pytest.mark.slow
def test_checkpoint_is_evaluated_with_rewards_of_other_ranks(work: Path) -> None:
    accuracy = read_rows(work / "runs/rewards-apart")[-1]["eval/accuracy"]
    assert f"step 3: held-out accuracy {accuracy:.4f}" in hybrid3d(work, "eval", "runs/rewards-apart", also=work)


@pytest.mark.slow
def test_reward_model_on_own_ranks_gives_training_ranks_rewards(work: Path) -> None:
    """With the layout of training bit for bit, in a split run; in another layout to the rounding of its sums."""
    save_classifier(work / "build/demo/base", work / "scorer")
    model = ("reward.model=scorer", "train.tp=1", "train.dp=1", "run.checkpoint_every=0", "model.dtype=float32")
    train(work, "name=scored", *model)
    split = ("roles.generation.ranks=1", "roles.reward.ranks=2", "machine.gpus_per_node=4")
    train(work, "name=scored-apart", *model, *split)
    train(work, "name=scored-tp2", *model, "roles.reward.ranks=2", "roles.reward.tp=2", "machine.gpus_per_node=4")
    alone, apart, sharded = (
        without(read_rows(work / "runs" / f"scored{n}"), *OF_TRAFFIC) for n in ("", "-apart", "-tp2")
    )
    assert alone == apart
    assert alone[0]["reward/mean"] != 0
    assert [row["reward/mean"] for row in sharded] == pytest.approx([row["reward/mean"] for row in alone], abs=1e-3)


@pytest.mark.slow
def test_rewards_of_other_ranks_on_ray_are_the_same(work: Path, cluster: str) -> None:
    """The ranks with engines fill one node; the one without has a CPU of its own."""
    more = ("debug.placement=consecutive", "roles.reward.ranks=1", "machine.gpus_per_node=2", "--ray", cluster)
    train(work, "name=rewards-on-ray", *more)
    assert without(read_rows(work / "runs/rewards-on-ray")) == without(read_rows(work / "runs/colocated"))


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_killed_rank_without_restarts_is_named_and_the_run_resumes(work: Path) -> None:
    assert "rank 3 failed: killed by SIGKILL" in printed_when_killed(work, "killed", 3, NO_RESTART)
    assert "resumed from runs/killed/checkpoints/step-000002" in train(work, *SPLIT, "name=killed", NO_RESTART)
    once, twice = (without(read_rows(work / "runs" / name), *OF_RESUME) for name in ("split", "killed"))
    assert once == twice


@pytest.mark.slow
def test_training_goes_on_through_twenty_kills_of_ranks_that_generate(work: Path) -> None:
    """All that is learned is as if there had been none; an engine that comes back is sent all weights, and checked.

    Every other kill comes when a step has been recorded, which is when a sync begins.
    """
    long = (*SPLIT, "run.eval_every=1000", "run.checkpoint_every=0", "roles.generation.max_restarts=20")
    train(work, *long, "name=steady", "run.steps=60")
    run, draw, kills = work / "runs/shaken", random.Random(1), 20
    with started(work, settings(*long, "name=shaken", "run.steps=999")) as process:
        wait_for_rows(run, 2, process)
        for kill in range(kills):
            wait_until(lambda: present(run), process)
            time.sleep(draw.uniform(0, 3))
            if kill % 2:
                wait_for_rows(run, recorded(run) + 1, process)
                time.sleep(draw.uniform(0, 0.06))
            child = child_of(run, draw.choice(present(run)))
            assert child is not None
            os.kill(child, signal.SIGKILL)
            wait_until(lambda: len(engine_events(run, "lost")) == kill + 1, process)  # noqa: B023
        wait_until(lambda: len(present(run)) == 2, process)
        (run / "control.yaml").write_text(f"run.steps: {recorded(run) + 25}\n")
        process.communicate(timeout=300)
        assert process.returncode == 0
    assert len(engine_events(run, "joined")) == kills
    assert {event["why"] for event in engine_events(run, "joined")} == {"killed by SIGKILL"}
    assert "a sync failed because a rank was lost" in (run / "logs/rank-0.log").read_text()
    steady, shaken = (read_rows(work / "runs" / name)[:-1] for name in ("steady", "shaken"))
    both = min(len(steady), len(shaken))
    assert both >= 30
    assert without(steady[:both], *OF_RESUME) == without(shaken[:both], *OF_RESUME)
    for row in shaken:
        assert not row["sync/dense"] or row["sync/received_bytes"] == row["sync/lower_bound_bytes"] > 0


@pytest.mark.slow
def test_ranks_that_generate_leave_and_join(work: Path) -> None:
    run, control = work / "runs/fewer", work / "runs/fewer/control.yaml"
    long = (*SPLIT, "name=fewer", "run.steps=999", "run.eval_every=1000", "run.checkpoint_every=0")
    with started(work, settings(*long, "roles.generation.active_ranks=1")) as process:
        wait_for_rows(run, 3, process)
        control.write_text("roles.generation.active_ranks: 2\n")
        wait_until(lambda: engine_events(run, "joined"), process)
        wait_for_rows(run, recorded(run) + 3, process)
        control.write_text("roles.generation.active_ranks: 1\n")
        wait_until(lambda: engine_events(run, "left"), process)
        wait_for_rows(run, recorded(run) + 3, process)
        control.write_text(f"run.steps: {recorded(run) + 5}\n")
        process.communicate(timeout=100)
        assert process.returncode == 0
    events = [(event["event"], event["ranks"]) for event in engine_events(run, "joined", "left", "lost")]
    assert events == [("engine_joined", [3]), ("engine_left", [3])]
    rows, alone = read_rows(run), read_rows(work / "runs/split")[0]["sync/lower_bound_bytes"] / 2
    dense = [row["sync/received_bytes"] / alone for row in rows if row["sync/dense"]]
    assert dense == [1, 2, 1]  # of one rank, of both, and of one again
    steady = read_rows(work / "runs/split")[:3]
    assert without(rows[:3], *OF_RESUME, "eval/accuracy", "eval/reward") == without(
        steady, *OF_RESUME, "eval/accuracy", "eval/reward"
    )


@pytest.mark.slow
def test_rank_that_generates_and_is_stopped_is_started_again(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRID3D_HEARTBEAT_SECONDS", "15")
    run, more = work / "runs/stopped", ("name=stopped", "run.steps=40", "run.eval_every=40", "run.checkpoint_every=0")
    with started(work, settings(*SPLIT, *more)) as process:
        wait_for_rows(run, 2, process)
        child = child_of(run, 2)
        assert child is not None
        os.kill(child, signal.SIGSTOP)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == 0
    assert "rank 2 lost: 1 of 2 engines can generate" in printed
    assert "rank 2 generates again after it was lost: killed by SIGKILL" in printed


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_generation_ranks_stay_up_while_training_ranks_are_restarted(work: Path, rank: int) -> None:
    name = f"again-{rank}"
    printed = printed_when_killed(work, name, rank, "run.max_restarts=1", expect=0)
    assert f"rank {rank} failed: killed by SIGKILL" in printed
    assert "starting the ranks that train again, from the last checkpoint (1 of run.max_restarts=1)" in printed
    assert f"resumed from runs/{name}/checkpoints/step-000002" in printed
    run = work / "runs" / name
    assert [event["ranks"] for event in engine_events(run, "kept", "lost", "joined")] == [[2], [3]]
    once, twice = (without(read_rows(path), *OF_RESUME) for path in (work / "runs/split", run))
    assert once == twice


@pytest.mark.slow
def test_training_ranks_lost_beyond_the_restarts_end_the_run(work: Path) -> None:
    """The first is before the ranks have met; then one that generates is lost too, while the others are restarted."""
    run = work / "runs/thrice"
    with started(work, settings(*SPLIT, "name=thrice", "run.steps=999", "run.max_restarts=2")) as process:
        for kill in range(3):
            if kill:
                wait_for_rows(run, kill, process)
            wait_until(lambda: child_of(run, 0), process)
            victims = [child_of(run, rank) for rank in ((0,), (1, 3), (0,))[kill]]
            for victim in victims:
                assert victim is not None
                os.kill(victim, signal.SIGKILL)
            if kill == 0:
                wait_until(lambda: (child_of(run, 0) or victims[0]) != victims[0], process)  # noqa: B023
        printed, _ = process.communicate(timeout=100)
        assert process.returncode == 1
        assert not ranks_of(run)
    assert "(1 of run.max_restarts=2)" in printed
    assert "(2 of run.max_restarts=2)" in printed
    assert [event["ranks"] for event in engine_events(run, "kept")] == [[2]]


def printed_when_killed(work: Path, name: str, rank: int | None, *more: str, expect: int = 1) -> str:
    """Start a run, kill a rank after the checkpoint of step 2, and return what the run prints until it ends.

    Without a rank, the command itself is killed, which the ranks must not outlive.
    """
    run = work / "runs" / name
    with started(work, settings(*SPLIT, f"name={name}", *more)) as process:
        end = time.monotonic() + 300
        while not (run / "checkpoints/step-000002").exists():
            assert time.monotonic() < end
            assert process.poll() is None
            time.sleep(0.01)
        assert len(ranks_of(run)) == (8 if "run.max_restarts=1" in more else 6)  # which have a parent each if restarted
        pid = process.pid if rank is None else child_of(run, rank) or ranks_of(run, rank)[0]
        os.kill(pid, signal.SIGKILL)
        printed, _ = process.communicate(timeout=60 if expect else 300)
        assert process.returncode == expect
        end = time.monotonic() + (60 if rank is None else 0)
        while ranks_of(run) and time.monotonic() < end:
            time.sleep(0.1)
        assert not ranks_of(run)
        return printed


def engine_events(run: Path, *what: str) -> list[dict[str, Any]]:
    """Return the events `engine_...` of a run."""
    events = read_events(run)
    return [event for event in events if event["event"] in {f"engine_{one}" for one in what}]


def present(run: Path) -> list[int]:
    """Return the ranks that generate, as the run's events say."""
    last = {event["ranks"][0]: event["event"] for event in engine_events(run, "lost", "joined")}
    return [rank for rank in (2, 3) if last.get(rank) != "engine_lost"]


def test_error_of_all_ranks_that_generate_ends_the_run(work: Path) -> None:
    train(work, *SPLIT, "name=fails", "reward.name=rewards:none", expect=1)
    reasons = [json.loads(path.read_text()) for path in (work / "runs/fails/logs").glob("rank-*.failure")]
    reasons = [reason for reason in reasons if not reason["peer"]]  # ranks that generate have lost the others
    assert reasons
    assert all(reason["on_all_ranks"] and "no reward today" in reason["reason"] for reason in reasons)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a Ray cluster of two nodes on this machine, with room for two ranks on each."""
    with ray_cluster(2, 2) as both:
        yield both.address


@pytest.mark.slow
def test_run_resumed_on_two_ray_nodes_is_the_same(work: Path, cluster: str) -> None:
    rows = without(read_rows(work / "runs/split"), *OF_RESUME)
    shutil.rmtree(work / "runs/split/checkpoints/step-000003")
    printed = train(work, *SPLIT, "--ray", cluster)
    assert "resumed from runs/split/checkpoints/step-000002" in printed  # by rank 0
    assert "split step 3" in printed
    assert without(read_rows(work / "runs/split"), *OF_RESUME) == rows


@pytest.mark.slow
def test_ranks_that_a_cluster_has_no_room_for_are_refused(work: Path, cluster: str) -> None:
    printed = refused(work, "--ray", cluster, "train.dp=2")
    assert "train.tp x pp x cp x dp + roles.generation.ranks = 6 ranks, 2 on a node (machine.gpus_per_node)" in printed
    assert f"but the nodes of the Ray cluster at {cluster} have 2, 2 CPUs" in printed
    printed = refused(work, "--ray", "127.0.0.1:1")
    assert "--ray 127.0.0.1:1: " in printed
    assert "start a cluster with `ray start`, or use local" in printed


def refused(work: Path, *more: str) -> str:
    """Return the message of a start that is refused."""
    command = [sys.executable, "-m", "hybrid3d", "train", *settings(*SPLIT, "name=refused"), *more]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(work), str(ROOT / "src")])}
    done = subprocess.run(command, cwd=work, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.slow
def test_rank_that_is_killed_on_ray_is_named(work: Path, cluster: str) -> None:
    printed = printed_when_killed(work, "killed-on-ray", 3, NO_RESTART, "--ray", cluster)
    assert "rank 3 failed: killed by SIGKILL" in printed


@pytest.mark.slow
def test_ray_ranks_end_with_the_command_and_the_run_resumes(work: Path, cluster: str) -> None:
    printed_when_killed(work, "lost-driver", None, "--ray", cluster, expect=-signal.SIGKILL)
    assert "resumed from runs/lost-driver/checkpoints/step-" in train(work, *SPLIT, "name=lost-driver")
    once, twice = (without(read_rows(work / "runs" / name), *OF_RESUME) for name in ("split", "lost-driver"))
    assert once == twice


@pytest.mark.slow
def test_generation_ranks_on_ray_stay_up_too(work: Path, cluster: str) -> None:
    printed = printed_when_killed(work, "kept-on-ray", 0, "--ray", cluster, "run.max_restarts=1", expect=0)
    assert "rank 0 failed: killed by SIGKILL" in printed
    assert "starting the ranks that train again" in printed
    assert [event["ranks"] for event in engine_events(work / "runs/kept-on-ray", "kept", "lost")] == [[2], [3]]
    once, twice = (without(read_rows(work / "runs" / name), *OF_RESUME) for name in ("split", "kept-on-ray"))
    assert once == twice


@pytest.mark.slow
def test_ranks_on_ray_are_started_again(work: Path, cluster: str) -> None:
    printed = printed_when_killed(work, "again-on-ray", 3, NO_RESTART, "--ray", cluster, "run.max_restarts=1", expect=0)
    assert "starting all ranks again, from the last checkpoint (1 of run.max_restarts=1)" in printed
    once, twice = (without(read_rows(work / "runs" / name), *OF_RESUME) for name in ("split", "again-on-ray"))
    assert once == twice

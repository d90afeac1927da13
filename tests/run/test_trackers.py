"""Trackers: what their own readers find is what the run has logged, also after a resume."""

from __future__ import annotations

import math
import struct
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from commands import ROOT, demo_folder, hybrid3d, read_rows
from hybrid3d.config import Recipe, RecipeError, load_recipe
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.launch.preflight import check_trackers
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.trackers import Trackers, find_problems

LEVELDB_BLOCK, LEVELDB_HEADER = 32768, struct.Struct("<IHB")  # CRC, length, kind
pytestmark = pytest.mark.processes

ROWS = {step: {"reward/mean": step / 8, "train/kl": 0.5, "train/none": math.nan} for step in range(6)}


def recipe(*trackers: str) -> Recipe:
    return load_recipe(ROOT / "recipes/demo-cpu.yaml", [f"tracking=[{','.join(trackers)}]"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "29464")
    return RunFolder(tmp_path / "run")


def log(folder: RunFolder, tracker: str, steps: range, read: Any = None, failed: bool = False) -> Any:
    """Log these steps, as a run that starts or resumes with the first of them; return what is read at the end."""
    failures: list[Any] = []
    trackers = Trackers(recipe(tracker), folder, lambda name, error: failures.append(error))
    for step in steps:
        trackers.log(step, ROWS[step])
    found = read() if read is not None else None
    trackers.close(failed)
    assert not failures
    return found


def test_tensorboard_has_each_step_once(folder: RunFolder) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log(folder, "tensorboard", range(5))
    log(folder, "tensorboard", range(3, 6))
    found = accumulators.EventAccumulator(str(folder.path / "tensorboard"))
    found.Reload()
    assert set(found.Tags()["scalars"]) == set(ROWS[0])
    for name in ("reward/mean", "train/kl"):
        values = {event.step: event.value for event in found.Scalars(name)}
        assert [event.step for event in found.Scalars(name)] == list(range(6))
        assert values == {step: row[name] for step, row in ROWS.items()}


def test_weights_and_biases_has_the_run_and_goes_on(folder: RunFolder) -> None:
    pytest.importorskip("wandb")
    log(folder, "wandb", range(3), failed=True)
    time.sleep(1)  # which the name of its folder ends with
    log(folder, "wandb", range(3, 6))
    ids, values, ends = set(), {}, []
    for path in sorted((folder.path / "wandb").glob("offline-run-*/run-*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                assert (record.run.project, record.run.display_name) == ("hybrid3d", "demo-cpu")
            if record.HasField("exit"):
                ends.append(record.exit.exit_code)
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                values[int(items["_step"])] = float(items["reward/mean"])
    assert len(ids) == 1
    assert ends == [1, 0]
    assert values == {step: row["reward/mean"] for step, row in ROWS.items()}


def wandb_records(path: Path) -> list[Any]:
    """Return the records of a file of Weights & Biases: LevelDB's log format, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts, records = path.read_bytes(), 7, b"", []
    while place < len(data):
        if LEVELDB_BLOCK - place % LEVELDB_BLOCK < LEVELDB_HEADER.size:  # zeros up to the next block
            place += LEVELDB_BLOCK - place % LEVELDB_BLOCK
            continue
        _, size, kind = LEVELDB_HEADER.unpack_from(data, place)
        place += LEVELDB_HEADER.size + size
        parts += data[place - size : place]
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(parts))
            parts = b""
    return records


def test_mlflow_has_the_run_and_goes_on_with_it(folder: RunFolder) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    client = tracking.MlflowClient()
    log(folder, "mlflow", range(3), failed=True)
    experiment = client.get_experiment_by_name("hybrid3d")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    log(folder, "mlflow", range(3, 6))
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo-cpu", "FINISHED")
    assert run.data.params == {key: str(value) for key, value in flatten_settings(to_raw(recipe("mlflow"))).items()}
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {metric.step: metric.value for metric in history} == {s: row["reward/mean"] for s, row in ROWS.items()}


def test_mlflow_takes_metrics_of_evaluations(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """It refuses names with `@`, and a file for a metric where another metric has a folder."""
    tracking = pytest.importorskip("mlflow.tracking")
    row = {"eval/accuracy": 0.25, "eval/pass@8": 0.5, "eval/hard/accuracy": 0.125, "eval/hard/majority@8": 0.75}
    monkeypatch.setitem(ROWS, 0, row)
    log(folder, "mlflow", range(1))
    client = tracking.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("hybrid3d").experiment_id])
    assert run.data.metrics == {key.replace("@", "_at_"): value for key, value in row.items()}


def test_prometheus_reads_the_last_step(folder: RunFolder) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    def read() -> dict[str, float]:
        with urllib.request.urlopen("http://localhost:29464/metrics", timeout=10) as answer:
            families = list(text_string_to_metric_families(answer.read().decode()))
        samples = [sample for family in families for sample in family.samples]
        assert {sample.labels["run"] for sample in samples} == {"demo-cpu"}
        return {sample.name: sample.value for sample in samples}

    found = log(folder, "prometheus", range(4), read)
    assert math.isnan(found.pop("hybrid3d_train_none"))
    assert found == {"hybrid3d_step": 3, "hybrid3d_reward_mean": 3 / 8, "hybrid3d_train_kl": 0.5}
    with pytest.raises(OSError, match="refused"):
        read()


def test_failing_tracker_is_named_once_and_others_go_on(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    failures = []
    trackers = Trackers(recipe("mlflow", "prometheus"), folder, lambda name, error: failures.append((name, error)))
    for step, row in ROWS.items():
        trackers.log(step, row)
    with urllib.request.urlopen("http://localhost:29464/metrics", timeout=10) as answer:
        assert 'hybrid3d_step{run="demo-cpu"} 5.0' in answer.read().decode()
    trackers.close(failed=False)
    ((name, error),) = failures
    assert name == "mlflow"
    assert "127.0.0.1" in str(error)


def test_tracker_needs_are_checked_before_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "http")
    monkeypatch.setattr(
        "hybrid3d.run.trackers.PACKAGES", {"mlflow": "no-such-mlflow", "prometheus": "prometheus_client"}
    )
    monkeypatch.setattr("hybrid3d.run.trackers.WHOLE_OF_MLFLOW", "no-such-mlflow")
    with pytest.raises(RecipeError) as refused:
        check_trackers(recipe("mlflow", "prometheus"))
    packages, address, port = refused.value.problems
    assert packages.startswith("tracking: no package for mlflow: install what is missing (pip install no-such-mlflow)")
    assert "MLFLOW_TRACKING_URI" in address
    assert "OTEL_EXPORTER_PROMETHEUS_PORT='http'" in port
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", "0")
    assert find_problems(["prometheus"]) == [
        "OTEL_EXPORTER_PROMETHEUS_PORT='0' is not a port: set it to a number from 1 to 65535"
    ]
    monkeypatch.delenv("OTEL_EXPORTER_PROMETHEUS_PORT")
    assert find_problems(["prometheus"]) == []


@pytest.mark.slow
@pytest.mark.engines
def test_run_that_resumes_goes_on_with_its_trackers(demo: Path, tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    work = demo_folder(tmp_path, demo)
    train = (
        *("train", str(ROOT / "recipes/demo-cpu.yaml"), "model.path=build/demo/base", "train.pp=1"),
        *("run.steps=3", "run.checkpoint_every=2"),
    )
    hybrid3d(work, *train, "tracking=[tensorboard,prometheus]")
    checkpoints = work / "runs/demo-cpu/checkpoints"
    (checkpoints / "step-000003").rename(work / "step-000003")
    hybrid3d(work, *train, "tracking=[tensorboard]")
    rows = read_rows(work / "runs/demo-cpu")
    found = accumulators.EventAccumulator(str(work / "runs/demo-cpu/tensorboard"))
    found.Reload()
    assert [event.step for event in found.Scalars("reward/mean")] == [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [event.value for event in found.Scalars("reward/mean")] == pytest.approx(
        [row["reward/mean"] for row in rows]
    )

"""Sends the metrics of a run to trackers: TensorBoard, Weights & Biases, MLflow, and an endpoint for Prometheus.

Each is configured by its own environment variables, as where it is used without hybrid3d. A tracker that fails does not
end the run: `metrics.jsonl` has everything.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hybrid3d import installed_version
from hybrid3d.config import Recipe
from hybrid3d.config.schema import flatten_settings, to_raw
from hybrid3d.run.folder import RunFolder

PACKAGES = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "prometheus": "prometheus_client",
}
WHOLE_OF_MLFLOW = "mlflow"  # which has what its small package has
PROJECT = "hybrid3d"  # of Weights & Biases, and the experiment of MLflow, where their variables name none
# Those of OpenTelemetry's exporter, with its defaults
PROMETHEUS_HOST, PROMETHEUS_PORT = "OTEL_EXPORTER_PROMETHEUS_HOST", "OTEL_EXPORTER_PROMETHEUS_PORT"
DEFAULT_PORT = "9464"
MLFLOW_URI = "MLFLOW_TRACKING_URI"
# So that training does not wait for minutes for a server that does not answer
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
MAX_PARAMETER = 6000  # characters of a setting's value that MLflow takes
MAX_PARAMETERS = 100  # that it takes at once


class Tracker(Protocol):
    """Where metrics are sent."""

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Send the metrics of a step."""

    def close(self, failed: bool) -> None:
        """Send what is left, and how the run has ended."""


class Trackers:
    """The trackers of a run."""

    def __init__(self, recipe: Recipe, folder: RunFolder, on_failure: Callable[[str, Exception], None]):
        """Start the recipe's trackers. One that fails is dropped, and `on_failure` gets its name and why."""
        self._on_failure = on_failure
        self._trackers: dict[str, Tracker] = {}
        for name in recipe.tracking:
            try:
                self._trackers[name] = STARTS[name](recipe, folder)
            except Exception as error:
                on_failure(name, error)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        self._each(lambda tracker: tracker.log(step, row))

    def close(self, failed: bool) -> None:
        """Send what is left, and whether the run has failed."""
        self._each(lambda tracker: tracker.close(failed))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                work(tracker)
            except Exception as error:
                del self._trackers[name]
                self._on_failure(name, error)


def find_problems(trackers: Sequence[str]) -> list[str]:
    """Return what is missing for these trackers, and how to get it."""
    missing = {
        tracker: PACKAGES[tracker]
        for tracker in trackers
        if not installed_version(PACKAGES[tracker], *([WHOLE_OF_MLFLOW] if tracker == "mlflow" else []))
    }
    problems = []
    if missing:
        fix = f"install what is missing (pip install {' '.join(missing.values())}), or leave them out"
        problems.append(f"no package for {', '.join(missing)}: {fix}")
    if "mlflow" in trackers and not os.environ.get(MLFLOW_URI):
        problems.append(f"mlflow needs {MLFLOW_URI}: set it to the address of its server, or leave mlflow out")
    port = os.environ.get(PROMETHEUS_PORT, DEFAULT_PORT)
    if "prometheus" in trackers and not (re.fullmatch("[0-9]{1,5}", port, re.ASCII) and 0 < int(port) < 2**16):
        problems.append(f"{PROMETHEUS_PORT}={port!r} is not a port: set it to a number from 1 to 65535")
    return problems


class TensorBoard:
    """Writes event files to `tensorboard/` in the run's folder."""

    def __init__(self, recipe: Recipe, folder: RunFolder):
        from torch.utils.tensorboard import SummaryWriter

        self._make_writer, self._folder = SummaryWriter, folder.path / "tensorboard"
        self._writer: Any = None

    def log(self, step: int, row: Mapping[str, float]) -> None:
        if self._writer is None:  # a run that resumes trains later steps again
            self._writer = self._make_writer(str(self._folder), purge_step=step)
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases:
    """Logs to a run of Weights & Biases, which a resumed run goes on with. `WANDB_MODE=offline` needs no network."""

    def __init__(self, recipe: Recipe, folder: RunFolder):
        wandb: Any = importlib.import_module("wandb")
        self._teardown = wandb.teardown
        known = _read_ids(folder).get("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", recipe.name),
            id=known,
            resume="allow" if known else None,
            dir=str(folder.path),
            config=to_raw(recipe),
            settings=wandb.Settings(silent=True, console="off"),
        )
        _write_id(folder, "wandb", self._run.id)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        self._run.log(dict(row), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        self._teardown()  # ends the process that writes, which may not have finished


class MLflow:
    """Logs to a run of MLflow at `MLFLOW_TRACKING_URI`, which a resumed run goes on with."""

    def __init__(self, recipe: Recipe, folder: RunFolder):
        for variable, value in MLFLOW_PATIENCE.items():
            os.environ.setdefault(variable, value)
        tracking: Any = importlib.import_module("mlflow.tracking")
        self._client = tracking.MlflowClient(os.environ[MLFLOW_URI])
        self._id = _read_ids(folder).get("mlflow")
        if self._id is None:
            experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            found = self._client.get_experiment_by_name(experiment)
            number = self._client.create_experiment(experiment) if found is None else found.experiment_id
            self._id = self._client.create_run(number, run_name=recipe.name).info.run_id
            try:
                self._log_settings(recipe)
            except Exception:  # the next start creates another run
                self._client.set_terminated(self._id, "FAILED")
                raise
            _write_id(folder, "mlflow", self._id)
        self._client.update_run(self._id, status="RUNNING")

    def _log_settings(self, recipe: Recipe) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        settings = flatten_settings(to_raw(recipe))
        params = [entities.Param(key, str(value)[:MAX_PARAMETER]) for key, value in settings.items()]
        for first in range(0, len(params), MAX_PARAMETERS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMETERS])

    def log(self, step: int, row: Mapping[str, float]) -> None:
        entities: Any = importlib.import_module("mlflow.entities")
        now = int(1000 * time.time())
        named = {name.replace("@", "_at_"): value for name, value in row.items()}  # MLflow accepts no `pass@8`
        self._client.log_batch(self._id, [entities.Metric(name, value, now, step) for name, value in named.items()])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


class Prometheus:
    """Serves the metrics of the last step, `train/kl` as `hybrid3d_train_kl`, at `/metrics` while the run goes on."""

    def __init__(self, recipe: Recipe, folder: RunFolder):
        client: Any = importlib.import_module("prometheus_client")
        self._make_gauge, self._name = client.Gauge, recipe.name
        self._registry, self._gauges = client.CollectorRegistry(), dict[str, Any]()
        host, port = os.environ.get(PROMETHEUS_HOST, "localhost"), int(os.environ.get(PROMETHEUS_PORT, DEFAULT_PORT))
        self._server, self._thread = client.start_http_server(port, host, self._registry)

    def log(self, step: int, row: Mapping[str, float]) -> None:
        for key, value in {"step": step, **row}.items():
            name = "hybrid3d_" + re.sub("[^a-zA-Z0-9_]", "_", key)
            if name not in self._gauges:
                self._gauges[name] = self._make_gauge(name, f"{key} of the last step", ["run"], registry=self._registry)
            self._gauges[name].labels(run=self._name).set(value)

    def close(self, failed: bool) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


STARTS: Mapping[str, Callable[[Recipe, RunFolder], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "prometheus": Prometheus,
}


def _read_ids(folder: RunFolder) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads(folder.trackers.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # there is none, or a full disk has cut it off
        return {}
    return found


def _write_id(folder: RunFolder, tracker: str, run_id: str) -> None:
    folder.trackers.write_text(json.dumps({**_read_ids(folder), tracker: run_id}, indent=2) + "\n", encoding="utf-8")

"""The timeline of a step, as a trace and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from hybrid3d.run.folder import RunFolder
from hybrid3d.run.logger import MAX_ROWS, draw_timeline, write_timeline
from hybrid3d.run.metrics import Span


@pytest.mark.parametrize("ranks", [2, 3 * MAX_ROWS + 1])
def test_step_of_two_roles(tmp_path: Path, ranks: int) -> None:
    folder, first = RunFolder(tmp_path), 1_000_000.0
    spans: dict[int, list[Span]] = {
        rank: [("sync", first + rank / 1000, first + 1), ("train", first + 1, first + 3)] for rank in range(ranks)
    }
    write_timeline(folder, 7, {"train": range(1), "generation": range(ranks)}, spans, {1: {"sync": 9}})
    trace = json.loads(folder.timeline.read_text())
    assert trace["otherData"] == {"step": 7}
    events = trace["traceEvents"]
    assert len(events) == 2 * ranks
    (second, *_) = (event for event in events if event["tid"] == 1)
    assert (second["name"], second["ph"], second["pid"]) == ("sync", "X", "generation")
    assert (second["ts"], second["dur"]) == (pytest.approx(1000), pytest.approx(999e3))
    assert [(event["tid"], event["args"]) for event in events if "args" in event] == [(1, {"peak_memory_bytes": 9})]
    assert (events[0]["pid"], events[1]["ts"], events[1]["dur"]) == ("train and generation", 1e6, 2e6)
    draw_timeline(folder)
    assert Image.open(tmp_path / "timeline.png").size[1] < 110 * (2 + 0.28 * MAX_ROWS)

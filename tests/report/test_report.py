"""The page of `hybrid3d report`, parsed by Python's own parser of HTML: its numbers, texts, states and size."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import itertools
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from commands import demo_folder, hybrid3d
from hybrid3d import cli
from hybrid3d.report.charts import format_number
from hybrid3d.report.page import MAX_BYTES
from hybrid3d.report.run_data import FINISHED, GOING_ON, STOPPED, read_run, select_samples
from hybrid3d.report.tables import memory_table, plan_table
from hybrid3d.report.timeline import NOBODY, cause_text, read_timeline
from hybrid3d.run.folder import PEAK, RunFolder
from report_runs import BOUND, BOUND_FROM_3, HOSTILE, row_of, write_run
from run_ranks import ROOT, environment

VOID = {"meta", "br", "input", "link", "img", "path", "rect"}
SIZE = 1000  # of a chart's coordinates


class Page(HTMLParser):
    """A page: its elements as (tag, attributes, text), in order, and its parsed data."""

    def __init__(self, path: Path):
        super().__init__()
        self.text = path.read_text()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self._open: list[int] = []
        self.feed(self.text)
        self.close()
        (data,) = (texts for _, attributes, texts in self.elements if attributes.get("id") == "data")
        self.data = json.loads("".join(data))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}, []))
        if tag not in VOID or (tag in ("path", "rect") and not self.get_starttag_text().endswith("/>")):
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        for place in self._open:
            self.elements[place][2].append(data)

    def close(self) -> None:
        super().close()
        assert self._open == [], "elements are left open"

    def all(self, tag: str, **wanted: str) -> list[tuple[dict[str, str], str]]:
        """Return attributes and text of all elements of a tag with these attributes (`class_` is contained)."""
        return [
            (attributes, "".join(texts))
            for found, attributes, texts in self.elements
            if found == tag
            and all(
                value in attributes.get("class", "").split() if key == "class_" else attributes.get(key) == value
                for key, value in wanted.items()
            )
        ]

    def rows(self, caption: str) -> dict[str, list[str]]:
        """Return the cells of a table by the label of their row."""
        start = next(
            i for i, (tag, _, texts) in enumerate(self.elements) if tag == "caption" and texts and texts[0] == caption
        )
        found: dict[str, list[str]] = {}
        for tag, attributes, texts in self.elements[start + 1 :]:
            if tag == "table":
                break
            if tag == "th" and attributes.get("scope") == "row":
                label = "".join(texts)
                found[label] = []
            elif tag == "td" and found:
                found[label].append("".join(texts))
        return found


def report(*arguments: object) -> Page:
    texts = [str(argument) for argument in arguments]
    assert cli.main(["report", *texts]) == 0
    out = texts[texts.index("--out") + 1] if "--out" in texts else f"{texts[0]}/report.html"
    return Page(Path(out))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_run(tmp_path_factory.mktemp("runs") / "tried")


@pytest.fixture(scope="module")
def page(folder: RunFolder) -> Page:
    return report(folder.path)


def metrics_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()]


def test_report_numbers_are_those_of_the_run(page: Page, folder: RunFolder) -> None:
    rows = metrics_of(folder)
    (run,) = page.data["runs"]
    assert set(run["metrics"]) == {key for row in rows for key in row} - {"step"}
    for key, found in run["metrics"].items():
        measured = [(row["step"], row[key]) for row in rows if key in row]
        assert list(zip(found["steps"], found["values"], strict=True)) == measured
    assert run["metrics"]["train/loss"]["values"][2] is None  # it was not finite
    times = [{k: v for k, v in row.items() if k == "step" or k.startswith("time/")} for row in rows]
    assert run["time"] == times


def test_curves_are_drawn_where_the_axes_say(page: Page, folder: RunFolder) -> None:
    values = [row["reward/mean"] for row in metrics_of(folder)]
    chart = chart_of(page, "reward/mean")
    path = next(a["d"] for tag, a, _ in chart if tag == "path" and "line" in a["class"].split() and "data-key" in a)
    drawn = [tuple(map(float, point.split())) for point in path.removeprefix("M").split("L")]
    assert [x for x, _ in drawn] == pytest.approx([SIZE * step / 6 for step in range(7)], abs=0.1)
    ticks = ticks_of(chart)
    (low, at_low), *_, (high, at_high) = ticks
    assert high > low
    slope = (high - low) / (at_high - at_low)
    assert [low + (y / SIZE * 100 - at_low) * slope for _, y in drawn] == pytest.approx(values, abs=2e-3)


def test_bounds_and_events_are_drawn(page: Page) -> None:
    chart = chart_of(page, "train/grad_norm")
    _legend, limit = (a["d"] for tag, a, _ in chart if tag == "path" and a["class"] == "limit")
    (low, at_low), *_, (high, at_high) = ticks_of(chart)
    height = {
        bound: 10 * (at_low + (bound - low) / (high - low) * (at_high - at_low)) for bound in (BOUND, BOUND_FROM_3)
    }
    (x1, y1, end1), (x2, y2, end2) = (map(float, re.split("[ H]", part)) for part in limit.split("M")[1:])
    assert (x1, end1, x2, end2) == (0, SIZE / 2, SIZE / 2, SIZE)  # it changed at step 3 of 6
    assert (y1, y2) == pytest.approx((height[BOUND], height[BOUND_FROM_3]), abs=1)
    marks = [(a["d"], "".join(texts)) for tag, a, texts in chart if tag == "path" and a["class"] == "mark" and texts]
    ((where, said),) = marks
    assert where == f"M{round(5 / 6 * SIZE, 1)} 0V1000"
    assert said.startswith("step 5: bound_left metric: train/grad_norm")


def chart_of(page: Page, key: str) -> list[tuple[str, dict[str, str], list[str]]]:
    """Return the elements of the chart of a metric."""
    starts = [i for i, (tag, *_) in enumerate(page.elements) if tag == "figure"] + [len(page.elements)]
    charts = [page.elements[a:b] for a, b in itertools.pairwise(starts)]
    (found,) = (chart for chart in charts if any(a.get("data-key") == key for _, a, _ in chart))
    end = next((i for i, (tag, *_) in enumerate(found) if tag == "section"), len(found))
    return found[:end]


def ticks_of(chart: list[tuple[str, dict[str, str], list[str]]]) -> list[tuple[float, float]]:
    """Return value and place in percent of the ticks of the vertical axis."""
    places = [(a["style"], "".join(texts)) for tag, a, texts in chart if tag == "span" and "top:" in a.get("style", "")]
    return [(float(text), float(style.removeprefix("top:").removesuffix("%"))) for style, text in places]


@pytest.mark.parametrize("ended", [True, False])
def test_texts_of_others_are_shown_and_never_run(tmp_path: Path, ended: bool) -> None:
    folder = write_run(tmp_path / "run", ended=ended)
    text = folder.recipe.read_text().replace("name: run\n", f"name: {json.dumps('run ' + HOSTILE)}\n")
    folder.recipe.write_text(text)
    with open(folder.metrics, "a") as out:
        out.write(json.dumps({"step": 7, f"own/{HOSTILE[:60]}": 1.0}) + "\n")
    page = report(folder.path)
    assert [attributes.get("type") for attributes, _ in page.all("script")] == ["application/json", None]
    assert page.all("img") == []
    assert not {key for _, attributes, _ in page.elements for key in attributes if key.startswith("on")}
    assert "<script>window" not in page.text
    assert "\x1b" not in page.text
    shown = HOSTILE.replace("\u2028", r"\u2028").replace("\x1b", r"\x1b")
    assert shown in page.all("h1")[0][1]
    assert shown in "".join(text for _, text in page.all("td", class_="details"))
    assert all(sample["answer"].endswith(HOSTILE) for sample in page.data["samples"])
    if not ended:
        assert shown in page.all("pre", class_="failure")[0][1]


def test_page_stands_alone(page: Page) -> None:
    assert {tag for tag, *_ in page.elements} & {"link", "iframe", "object", "embed", "base", "form"} <= {"form"}
    references = [a[key] for _, a, _ in page.elements for key in ("src", "href", "action", "srcset") if key in a]
    assert all(reference.startswith("#") for reference in references)
    assert "url(" not in page.text
    assert "@import" not in page.text
    ((policy, _),) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    script = page.all("script")[1][1]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert "default-src 'none'" in policy["content"]
    assert f"script-src 'sha256-{allowed}'" in policy["content"]
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {reference.removeprefix("#") for reference in references} <= set(ids)


def test_samples_are_those_of_the_run(page: Page, folder: RunFolder) -> None:
    written = [json.loads(line) for line in folder.samples.read_text().splitlines()]
    shown = [(s["step"], s["reward"], s["prompt"], s["answer"]) for s in page.data["samples"]]
    assert shown == [(s["step"], s["reward"], s["prompt"], s["answer"]) for s in written]
    assert "28 of 28 recorded samples are in this page." in page.text


def test_states(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ended=False)
    with open(folder.metrics, "a") as out:
        out.write('not JSON\n[1]\n{"step": 7, "reward/me')  # as a crash leaves it
    run = read_run(folder.path)
    assert (run.state, len(run.rows), run.unreadable) == (STOPPED, 7, {"metrics.jsonl": 3})
    page = report(folder.path)
    assert [text for _, text in page.all("span", class_="badge")] == [STOPPED]
    assert "3 line(s) of metrics.jsonl could not be read" in page.text
    assert "a run writes that of each step that updates the models when the step is complete" in page.text
    with folder.lock(pytest.fail):
        assert read_run(folder.path).state == GOING_ON
    folder.add_event("resume", step=6)
    folder.add_event("end", step=6)
    assert read_run(folder.path).state == FINISHED
    folder.add_event("resume", step=6)
    assert read_run(folder.path).state == STOPPED


def test_reading_does_not_lock_a_run_out(folder: RunFolder) -> None:
    assert read_run(folder.path).state == FINISHED
    with open(folder.path / ".lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder.path / ".lock").unlink()


def test_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", ended=False)
    for path in (folder.metrics, folder.samples, folder.events):
        path.unlink()
    page = report(folder.path)
    assert "No step is recorded yet." in page.text
    assert page.data == {"runs": [{"name": "run", "metrics": {}, "time": []}], "samples": []}


@pytest.mark.parametrize("kind", ["missing", "file", "empty", "no mapping", "metrics is a folder"])
def test_report_refuses_what_is_no_run(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run"
    if kind == "file":
        path.write_text("")
    elif kind != "missing":
        path.mkdir()
    if kind in ("no mapping", "metrics is a folder"):
        (path / "recipe.yaml").write_text("[1]\n" if kind == "no mapping" else "name: x\n")
    if kind == "metrics is a folder":
        (path / "metrics.jsonl").mkdir()
    assert cli.main(["report", str(path)]) == 2
    out, message = capsys.readouterr()
    assert out == ""
    assert len(message.splitlines()) == 2
    assert str(path) in message
    assert "Traceback" not in message
    assert not (path / "report.html").exists()


def test_page_that_cannot_be_written(folder: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (tmp_path, tmp_path / "nowhere" / "page.html"):
        assert cli.main(["report", str(folder.path), "--out", str(out)]) == 2
        assert "name another file with --out" in capsys.readouterr().err


def test_report_of_two_runs_shows_both(folder: RunFolder, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", "optimizer.lr=3e-4", steps=3)
    page = report(folder.path, other.path, "--out", tmp_path / "both.html")
    assert [run["name"] for run in page.data["runs"]] == ["tried", "other"]
    assert [len(run["metrics"]["reward/mean"]["steps"]) for run in page.data["runs"]] == [7, 4]
    assert [sample["run"] for sample in page.data["samples"]] == [0] * 28 + [1] * 16
    differences = page.rows("Settings that differ")
    assert differences == {"name": ["tried", "other"], "optimizer.lr": ["0.0002", "0.0003"], "run.steps": ["6", "3"]}
    assert page.rows("Overview")["Steps"] == ["6 of 6", "3 of 3"]
    both = [a for _, a, _ in chart_of(page, "reward/mean") if a.get("data-key") == "reward/mean"]
    assert [a["data-run"] for a in both] == ["0", "1"]


def test_seconds_are_attributed(page: Page) -> None:
    # 1 + 3 + 5 of 10 seconds; an evaluation is not of the step
    assert "90.00 % of the seconds of all steps are attributed" in page.text
    cells = page.rows("Seconds of the step by phase, on rank 0")
    assert {label: cells[label][:2] for label in ("time/train", "not attributed")} == {
        "time/train": ["4.500", "45.0 %"],  # of step 5, whose timeline is shown
        "not attributed": ["1.000", "10.0 %"],
    }


def test_idle_seconds_have_a_cause(folder: RunFolder) -> None:
    timeline = read_timeline(folder.timeline)
    assert timeline is not None
    assert (timeline.step, timeline.seconds) == (5, pytest.approx(10))
    train, generation = timeline.by_role()
    assert (train.role, train.busy, train.idle) == ("train", pytest.approx({"sync": 1, "generate": 3, "train": 6}), {})
    # Three seconds of waiting and one of which nothing is recorded, while the other rank trains
    assert generation.idle == pytest.approx({"train": 4})
    assert timeline.attributed_fraction() == pytest.approx(1)
    events = json.loads(folder.timeline.read_text())
    events["traceEvents"] = [e for e in events["traceEvents"] if (e["tid"], e["name"]) != (0, "generate")]
    events["traceEvents"] = [e for e in events["traceEvents"] if (e["tid"], e["name"]) != (1, "generate")]
    changed = folder.path / "changed.json"
    changed.write_text(json.dumps(events))
    without = read_timeline(changed)
    assert without is not None
    assert [role.idle.get(NOBODY) for role in without.by_role()] == pytest.approx([3, 3])
    assert without.attributed_fraction() == pytest.approx(0.7)


def test_recording_is_an_activity_of_its_own(folder: RunFolder, tmp_path: Path) -> None:
    """With its memory, and as what others wait for."""
    trace = json.loads(folder.timeline.read_text())
    trained = next(e for e in trace["traceEvents"] if (e["tid"], e["name"]) == (0, "train"))
    trained |= {"name": "record", "args": {PEAK: 5e9}}
    (tmp_path / "timeline.json").write_text(json.dumps(trace))
    timeline = read_timeline(tmp_path / "timeline.json")
    assert timeline is not None
    assert timeline.ranks[0].peaks == {"record": 5e9}
    train, generation = timeline.by_role()
    assert train.busy["record"] == pytest.approx(6)
    assert generation.idle == pytest.approx({"record": 4})
    assert cause_text("record") == "idle while others record the step"


@pytest.mark.parametrize(
    ("number", "text"),
    [(9999.4, "9,999"), (9999.7, "10,000"), (-9999.7, "-10,000"), (12345.6, "12,346"), (0.12345, "0.1235")],
)
def test_number_has_four_digits_and_no_exponent(number: float, text: str) -> None:
    assert format_number(number) == text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
KEYS = st.sampled_from(
    [
        *("step", "event", "time", "key", "old", "new", "metric", "reward/mean", "time/step", "time/x", "sync/dense"),
        *(
            "prompt",
            "answer",
            "reward",
            "answer_tokens",
            "name",
            "pid",
            "tid",
            "ts",
            "dur",
            "ph",
            "sync/received_bytes",
            "device",
            "args",
            "memory/max_train_bytes",
        ),
    ]
)
EVENTS = st.sampled_from(["bound_left", "setting_changed", "start", "end", "kl_fixed"]) | VALUES
RECORDS = st.lists(
    st.dictionaries(KEYS, st.integers(0, 3) | VALUES, max_size=8)
    | st.fixed_dictionaries({"event": EVENTS, "step": VALUES, "metric": VALUES, "key": VALUES, "time": VALUES}),
    max_size=5,
)


@example(records=[{"event": "end", "step": 5.133389243627449e16, "time": 0}], other=[])
@example(records=[{"event": "end", "step": 2.0**52, "reward/mean": 5e-324}, {"step": 3, "reward/mean": 0}], other=[])
@example(records=[{"step": 1, "reward/mean": -9e299}, {"step": 2, "reward/mean": 9e299}], other=[])
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=RECORDS, other=RECORDS)
def test_report_page_is_made_from_any_records(tmp_path: Path, records: list[Any], other: list[Any]) -> None:
    folder = RunFolder(tmp_path / "run")
    if not folder.path.exists():
        write_run(folder.path)
    for path in (folder.metrics, folder.samples, folder.events, folder.memory):
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
    folder.timeline.write_text(json.dumps({"traceEvents": other, "otherData": {"step": 1}}))
    report(folder.path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"traceEvents": [{"name": 1}]}', '{"traceEvents": []}', "[" * 10**5])
def test_timeline_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "timeline.json").write_text(text)
    assert read_timeline(tmp_path / "timeline.json") is None


def test_syncs_and_the_plan(page: Page, folder: RunFolder) -> None:
    syncs = page.rows("Bytes, seconds and verification of syncs")
    assert syncs["Bytes of a dense sync, median"][0] == "2.5 GB"
    assert syncs["of the bytes of a dense sync"][0] == "4 %"
    assert syncs["Exposed share of a step, median"][0] == "0.5 %"
    plan = {"received_bytes": 2500000000, "max_staging_bytes": 123456, "seconds": {"sync": 0.01}}
    plan |= {"memory": {"gpu": 80e9, "train": 40e9, "sync": 30e9, "generate": 60e9, "max_weights": 8e9}}
    rows = {row.label: row.cells for row in plan_table(read_run(folder.path), plan)}
    assert rows["Received by all ranks"] == ["2.5 GB (2,500,000,000)"] * 2
    assert rows["Staging, fullest rank"] == ["123.5 kB (123,456)"] * 2
    assert rows["Seconds of a dense sync"] == ["0.01 s", "0.1 s"]
    _, rows_of_memory = memory_table(read_run(folder.path), plan)
    assert [row.cells for row in rows_of_memory][2:] == [["60 GB", "75 %"], ["8 GB", "10 %"]]


def test_long_run_fits_the_page(tmp_path: Path) -> None:
    steps = 3000
    folder = write_run(tmp_path / "run")
    chance_keys = [f"own/{i}" for i in range(60)]
    rows = [
        row_of(step) | {key: (step * 7919 + i) % 1009 / 7 for i, key in enumerate(chance_keys)} for step in range(steps)
    ]
    rows = [{key: None if value != value else value for key, value in row.items()} for row in rows]
    folder.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answer = "x" * 8000
    samples = (
        {"step": n // 4, "prompt": "", "answer": f"{n} {answer}", "reward": n % 4} for n in range(4 * steps // 4)
    )
    folder.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    for _ in range(1000):
        folder.add_event("reward_failed", step=1, examples="<" * 1000)
    page = report(folder.path)
    assert len(page.text.encode()) < MAX_BYTES
    for key, found in page.data["runs"][0]["metrics"].items():
        exact = {row["step"]: row[key] for row in rows}
        assert all(exact[step] == value for step, value in zip(found["steps"], found["values"], strict=True))
        finite = [value for value in exact.values() if value is not None]
        assert {min(finite), max(finite)} <= set(found["values"])
    assert re.search(r"curves show [\d,]+ of 3,000 steps", page.text)
    assert {sample["step"] for sample in page.data["samples"]} >= {0, steps // 4 - 1}
    assert f"{len(page.data['samples'])} of 3,000 recorded samples are in this page" in page.text
    assert all(len(s["answer"]) < 6100 and s["answer"].endswith("xxx") for s in page.data["samples"])


def test_samples_are_selected_evenly(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    rows = [
        {"step": step, "prompt": "p" * 100, "answer": step, "reward": None} for step in range(1000) for _ in range(2)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 1000, "pro')
    found = select_samples(path, 100_000)
    steps = [sample["step"] for sample in found.shown]
    assert (found.total, found.unreadable) == (2000, 1)
    assert steps == sorted(2 * [*range(0, 1000, found.every), *([999] if 999 % found.every else [])])
    assert 25_000 < len(json.dumps(found.shown)) < 100_000
    one_step = tmp_path / "one.jsonl"
    one_step.write_text("".join(json.dumps(row | {"step": 5}) + "\n" for row in rows))
    assert len(json.dumps(select_samples(one_step, 100_000).shown)) < 100_000


@pytest.mark.engines
@pytest.mark.slow
def test_plan_is_that_of_the_command(demo: Path, tmp_path: Path) -> None:
    demo_folder(tmp_path, demo)
    model = "model.path=build/demo/base"
    run = write_run(tmp_path / "runs" / "planned", model).path.relative_to(tmp_path)
    planned = json.loads(hybrid3d(tmp_path, "plan", str(run / "recipe.yaml"), "--json"))
    hybrid3d(tmp_path, "report", str(run), "--plan")
    page = Page(tmp_path / run / "report.html")
    received, _ = page.rows("Plan against measured, a sync of all weights")["Received by all ranks"][:2]
    assert f"({planned['received_bytes']:,})" in received
    gpu = f"{planned['memory']['gpu'] / 1e9:.4g} GB"
    memory = page.rows(f"Planned memory by phase, fullest of GPUs of {gpu}")
    assert memory["Training"][0] == f"{planned['memory']['train'] / 1e9:.4g} GB"  # of which most is not the model's


def test_report_imports_no_torch(folder: RunFolder) -> None:
    script = "import sys; from hybrid3d import cli; assert cli.main(sys.argv[1:]) == 0; print(sorted(sys.modules))"
    command = [sys.executable, "-c", script, "report", str(folder.path)]
    done = subprocess.run(command, cwd=ROOT, env=environment("report"), capture_output=True, text=True, check=True)
    modules = set(re.findall(r"'([\w.]+)'", done.stdout))
    assert "jinja2" in modules
    assert modules.isdisjoint({"torch", "numpy", "megatron", "vllm", "transformers", "matplotlib"})

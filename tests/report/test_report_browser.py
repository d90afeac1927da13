"""The page of `hybrid3d report` in a browser, where one is installed (`pip install PySide6`)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybrid3d import cli
from report_runs import write_run

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(importlib.util.find_spec("PySide6") is None, reason="no browser: PySide6 is not installed"),
]

# Loads a page in a window of some width, runs a script in it, and prints its result and what the console said.
BROWSER = """
import json, sys
from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

page_path, width, script = sys.argv[1:]
application, said = QApplication(sys.argv[:1]), []

class Page(QWebEnginePage):
    def javaScriptConsoleMessage(self, level, message, line, source):
        said.append(message)

def ready(result):
    print(json.dumps([json.loads(result), said]))
    application.quit()

view = QWebEngineView()
page = Page(view)
view.setPage(page)
view.resize(int(width), 900)
view.show()
page.loadFinished.connect(lambda done: page.runJavaScript(f"JSON.stringify((() => {{{script}}})())", ready))
page.load(QUrl.fromLocalFile(page_path))
QTimer.singleShot(60000, application.quit)
sys.exit(application.exec())
"""
DARK = "--blink-settings=preferredColorScheme=0"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    work = tmp_path_factory.mktemp("runs")
    for name in ("one", "other"):
        write_run(work / name)
    one, both = work / "one" / "report.html", work / "both.html"
    assert cli.main(["report", str(work / "one")]) == 0
    assert cli.main(["report", str(work / "one"), str(work / "other"), "--out", str(both)]) == 0
    write_run(work / "long", steps=40)  # whose last numbers below curves have two digits
    assert cli.main(["report", str(work / "long")]) == 0
    return {"one": one, "both": both, "long": work / "long" / "report.html"}


def run_in(page: Path, script: str, width: int = 1200, flags: str = "") -> Any:
    """Return what a script, the body of a function, returns in a page; nothing may have been printed to the console."""
    variables = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    variables["QTWEBENGINE_CHROMIUM_FLAGS"] = f"--disable-gpu {flags}"
    command = [sys.executable, "-c", BROWSER, str(page), str(width), script]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    result, said = json.loads(done.stdout.splitlines()[-1])
    assert said == []
    return result


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("name", ["one", "both"])
def test_report_page_lets_only_tables_scroll_sideways(pages: dict[str, Path], name: str, width: int) -> None:
    script = "for (const d of document.querySelectorAll('details')) d.open = true;"
    script += "return [document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    inside, outside = run_in(pages[name], script, width)
    assert inside <= outside <= width


@pytest.mark.parametrize("width", [360, 1280])
def test_number_below_a_curve_is_one_line(pages: dict[str, Path], width: int) -> None:
    script = """
        const numbers = [...document.querySelectorAll(".x-axis span")];
        const isBroken = (n) => n.getBoundingClientRect().height > 1.8 * parseFloat(getComputedStyle(n).fontSize);
        return [numbers.length, numbers.filter(isBroken).map((n) => n.textContent)];
    """
    count, broken = run_in(pages["long"], script, width)
    assert count > 20
    assert broken == []


def test_texts_of_others_do_not_run(pages: dict[str, Path]) -> None:
    assert run_in(pages["both"], "return [typeof window.hacked, document.querySelectorAll('img').length]") == [
        "undefined",
        0,
    ]


def test_samples_are_filtered(pages: dict[str, Path]) -> None:
    script = """
    const set = (id, value) => {
      const field = document.getElementById(id);
      field.value = value;
      field.dispatchEvent(new Event("input", {bubbles: true}));
    };
    const seen = () => [...document.querySelectorAll(".sample h3")].map((one) => one.textContent.slice(0, 17));
    const found = [];
    set("f-from", "2"); set("f-to", "3"); set("f-low", "1"); found.push(seen());
    set("f-text", "QUESTION 3 of"); found.push(seen());
    set("f-text", "nowhere"); found.push(seen());
    found.push(document.getElementById("found").textContent);
    return found;
    """
    both, one, none, said = run_in(pages["one"], script)
    assert both == ["step 3 · reward 1"] * 2 + ["step 2 · reward 1"] * 2
    assert one == ["step 3 · reward 1", "step 2 · reward 1"]
    assert none == []
    assert said.startswith("0 of 28 samples match")


def test_values_under_the_pointer_and_by_keys(pages: dict[str, Path]) -> None:
    script = """
    const chart = document.querySelector('[data-key="eval/accuracy"]').closest(".chart");
    const box = chart.querySelector(".area").getBoundingClientRect();
    const said = () => chart.querySelector(".hover").textContent;
    const options = {clientX: box.left + box.width / 2, clientY: box.top, bubbles: true};
    chart.querySelector(".area svg").dispatchEvent(new PointerEvent("pointermove", options));
    const found = [said()];
    chart.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
    return found.concat(said());
    """
    # 0.1 + 3 / 7 and 0.1 + 4 / 7
    assert run_in(pages["one"], script) == ["step 3: 52.8571 %", "step 4: 67.1429 %"]


def test_step_choice_shows_the_phases_of_another_step(pages: dict[str, Path]) -> None:
    script = """
    const choice = document.querySelector(".step");
    choice.selectedIndex = 2;
    choice.dispatchEvent(new Event("change"));
    return [...document.querySelectorAll(".phases tr[data-phase]")].map((row) => row.textContent.replace(/\\s+/g, " "))
    """
    rows = run_in(pages["one"], script)
    assert rows[2].startswith("time/train4.80048.0 %")
    assert rows[4].startswith("not attributed1.00010.0 %")


def test_text_has_contrast_in_both_schemes(pages: dict[str, Path]) -> None:
    script = """
    const style = getComputedStyle(document.documentElement);
    const names = ["--back", "--card", "--text", "--soft", "--link", "--good", "--bad"];
    return names.map((name) => style.getPropertyValue(name));
    """
    seen = []
    for flags in ("", DARK):
        back, card, *inks = run_in(pages["one"], script, flags=flags)
        seen.append(back)
        assert min(contrast(ink, paper) for ink in inks for paper in (back, card)) >= 4.5  # WCAG 2.2, level AA
    assert seen[0] != seen[1]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colors, as WCAG 2.2 defines it."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def luminance(color: str) -> float:
    channels = [int(color.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

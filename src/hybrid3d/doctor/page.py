"""The page of `hybrid3d doctor`: its findings as text, or as JSON.

`EXAMINATIONS` is the list of checks, in the order of the page. Register new checks there.
"""

from __future__ import annotations

import json
import socket
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hybrid3d.config import Recipe
from hybrid3d.doctor import files, groups, network, packages, resources
from hybrid3d.doctor.answers import ask
from hybrid3d.doctor.finding import CANNOT_START, OK, SLOW, Context, Finding, Severity

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Examination:
    """One part of the page.

    Attributes:
        subject: its title, by which `--only` selects it.
        check: returns what it finds; nothing where it does not apply.
        questions: of `answers.questions`, those whose answers it uses.
    """

    subject: str
    check: Callable[[Context], Iterable[Finding]]
    questions: tuple[str, ...] = ()


EXAMINATIONS = (
    Examination("devices", resources.check_gpus, ("machine", "nccl")),
    Examination("packages", packages.check_pins),
    Examination("engines", packages.check_kernels, ("kernels",)),
    Examination("start", packages.check_preflight, ("devices", "preflight")),
    Examination("shared-memory", resources.check_shared_memory),
    Examination("limits", resources.check_limits),
    Examination("cores", resources.check_cores),
    Examination("memory", resources.check_memory, ("machine", "needs")),
    Examination("run-folder", files.check_run_folder),
    Examination("checkpoints", files.check_free_space, ("needs",)),
    Examination("model", files.check_model_files),
    Examination("interfaces", network.check_interfaces),
    Examination("host", network.check_host),
    Examination("rendezvous", network.check_rendezvous),
    Examination("groups", groups.check_groups, ("machine", "devices")),
)

Subject = tuple[str, tuple[Finding, ...]]
"""What was examined, and what was found."""


def examine(
    recipe: Recipe | None,
    examinations: Sequence[Examination] = EXAMINATIONS,
    on_progress: Callable[[str], None] = lambda what: None,
) -> Iterator[Subject]:
    """Examine this machine and, if there is a recipe, whether its run can start here."""
    on_progress("asking torch and the engines")
    questions = {question for examination in examinations for question in examination.questions}
    context = Context(recipe, ask(recipe, questions) if questions else {})
    for examination in examinations:
        on_progress(examination.subject)
        yield examination.subject, tuple(examination.check(context))


STYLES: dict[Severity, str] = {OK: "green", SLOW: "yellow", CANNOT_START: "bold red"}
WIDTH = len(CANNOT_START)


def can_start(subjects: Sequence[Subject]) -> bool:
    """Return whether no finding keeps a run from starting."""
    return all(finding.severity != CANNOT_START for finding in _findings(subjects))


def format_json(recipe: Recipe | None, subjects: Sequence[Subject]) -> str:
    """Return one JSON object: `host`, `recipe`, `can_start` and `findings`, each with its `subject`."""
    found = [{"subject": subject, **asdict(finding)} for subject, findings in subjects for finding in findings]
    page = {
        "host": socket.gethostname(),
        "recipe": None if recipe is None else recipe.name,
        "can_start": can_start(subjects),
        "findings": found,
    }
    return json.dumps(page, indent=2)


def print_page(console: Console, recipe: Recipe | None, subjects: Sequence[Subject], as_json: bool) -> None:
    """Print the page, or the object of `format_json`."""
    if as_json:
        console.print(format_json(recipe, subjects), soft_wrap=True)
        return
    for line, style in format_page(recipe, subjects, console.width if console.is_terminal else None):
        console.print(line, style=style, soft_wrap=True)


def format_page(recipe: Recipe | None, subjects: Sequence[Subject], width: int | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of the page, each with its style.

    Args:
        width: columns after which lines are wrapped; None leaves them as they are.
    """
    for subject, findings in subjects:
        if findings:
            yield subject, "bold"
        for finding in findings:
            label = f"  {finding.severity:{WIDTH}}  "
            for line in _wrap(finding.found, label, width):
                yield line, STYLES[finding.severity]
            if finding.fix:
                for line in _wrap(finding.fix, f"{'':{len(label)}}-> ", width):
                    yield line, ""
    yield "", ""
    yield _summary(recipe, subjects), "bold"


def _wrap(text: str, label: str, width: int | None) -> list[str]:
    """Return a text in lines, the first after the label and the others below it."""
    lines = text.splitlines()
    if width is not None:
        room = max(20, width - len(label))
        lines = [part for line in lines for part in _wrap_line(line, room)]
    return [f"{label if not number else ' ' * len(label)}{line}" for number, line in enumerate(lines)]


def _wrap_line(line: str, room: int) -> list[str]:
    """Wrap at blanks only, so that commands and paths can be copied."""
    return textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False) or [""]


def _summary(recipe: Recipe | None, subjects: Sequence[Subject]) -> str:
    counts = {kind: sum(finding.severity == kind for finding in _findings(subjects)) for kind in STYLES}
    what = "a run" if recipe is None else recipe.name
    verdict = "can start here" if can_start(subjects) else "cannot start here"
    return f"{what} {verdict}: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())


def _findings(subjects: Sequence[Subject]) -> Iterator[Finding]:
    for _, findings in subjects:
        yield from findings

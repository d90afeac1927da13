"""The page of `hybrid3d doctor`: its findings as text, or as JSON.

`EXAMINATIONS` is the list of checks, in the order of the page. Register new checks there. Several nodes are examined by
the ranks that torchrun or srun has started on them.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from textwrap import TextWrapper
from typing import TYPE_CHECKING

from hybrid3d import launch_environment
from hybrid3d.config import Recipe
from hybrid3d.doctor import CANNOT_START, OK, SLOW, Context, Finding, files, groups, network, packages, resources
from hybrid3d.doctor.answers import SECONDS, ask
from hybrid3d.run.folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

    from hybrid3d.ledger import RankStart


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
    examinations: Sequence[Examination],
    on_progress: Callable[[str], None] = lambda what: None,
) -> Iterator[Subject]:
    """Examine this machine and, if there is a recipe, whether its run can start here."""
    on_progress("asking torch and the engines")
    questions = {question for examination in examinations for question in examination.questions}
    context = Context(recipe, ask(recipe, questions) if questions else {})
    for examination in examinations:
        on_progress(examination.subject)
        yield examination.subject, tuple(examination.check(context))


STYLES = {OK: "green", SLOW: "yellow", CANNOT_START: "bold red"}
WIDTH = len(CANNOT_START)


def can_start(subjects: Sequence[Subject]) -> bool:
    """Return whether no finding keeps a run from starting."""
    return CANNOT_START not in _severities(subjects)


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
        at_blanks = TextWrapper(room, break_long_words=False, break_on_hyphens=False)  # commands can be copied
        lines = [part for line in lines for part in at_blanks.wrap(line) or [""]]
    return [f"{label if not number else ' ' * len(label)}{line}" for number, line in enumerate(lines)]


def _summary(recipe: Recipe | None, subjects: Sequence[Subject]) -> str:
    found = _severities(subjects)
    what = "a run" if recipe is None else recipe.name
    verdict = "can start here" if can_start(subjects) else "cannot start here"
    return f"{what} {verdict}: " + ", ".join(f"{found.count(kind)} {kind}" for kind in STYLES)


def _severities(subjects: Sequence[Subject]) -> list[str]:
    return [finding.severity for _, findings in subjects for finding in findings]


ON_ALL_NODES = ("rendezvous", "groups")  # subjects about all nodes together: the ranks themselves try both


class NodesExamination:
    """Examines this node, if this is its first rank, and then, with all ranks, the process groups.

    Attributes:
        can_start: after `run`, whether a run can start on these nodes; equal on every rank.
    """

    def __init__(self, recipe: Recipe, examinations: Sequence[Examination], as_json: bool):
        self.can_start = True
        self._recipe, self._as_json = recipe, as_json
        self._measures = any(one.subject == "groups" for one in examinations)
        self._of_node: list[Subject] = []
        if launch_environment.local_rank() == 0:
            here = [one for one in examinations if one.subject not in ON_ALL_NODES]
            self._of_node = list(examine(recipe, here))

    def run(self, folder: RunFolder, start: RankStart) -> None:
        """Measure, and print the page on rank 0. Every rank calls this together."""
        from hybrid3d.ledger import gather, share  # imports torch

        rank, store, console = start.rank, start.store, start.console
        found = [[subject, [asdict(one) for one in findings]] for subject, findings in self._of_node]
        of_nodes = gather(store, rank, launch_environment.world_size(), "doctor", [socket.gethostname(), found])
        subjects: list[Subject] = [
            (f"{host}: {subject}", tuple(Finding(**one) for one in findings))
            for host, found in of_nodes
            for subject, findings in found
        ]

        def share_verdict(on: str) -> None:
            """Let every rank know what rank 0 knows: whether a run can start."""
            wait = timedelta(seconds=2 * SECONDS)
            self.can_start = share(store, rank, f"verdict on {on}", lambda: can_start(subjects), wait)

        share_verdict("nodes")
        if self._measures and self.can_start:
            groups.measure_groups(self._recipe, folder, start)
            subjects += [("groups", self._compare(folder))] if rank == 0 else []
            share_verdict("groups")
        if rank == 0:
            assert console is not None, "rank 0 has a console"
            print_page(console, self._recipe, subjects, self._as_json)

    def _compare(self, folder: RunFolder) -> tuple[Finding, ...]:
        machine = Context(self._recipe, ask(self._recipe, ["machine"])).answer("machine")
        measured = json.loads((folder.path / groups.GROUPS).read_text(encoding="utf-8"))
        return tuple(groups.describe(self._recipe, measured, bool(machine and machine["gpus"])))

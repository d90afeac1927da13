"""What is examined, in the order of the page; a new examination gets a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hybrid3d.config import Recipe
from hybrid3d.doctor import devices, engines, files, groups, network, packages, resources
from hybrid3d.doctor.answers import ask
from hybrid3d.doctor.finding import Context, Finding


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
    Examination("devices", devices.check_gpus, ("machine", "nccl")),
    Examination("packages", packages.check_pins),
    Examination("engines", engines.check_kernels, ("kernels",)),
    Examination("start", engines.check_preflight, ("devices", "preflight")),
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

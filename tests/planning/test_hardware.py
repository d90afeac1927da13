"""The GPUs that `machine.kind` names, against the arithmetic of their data sheets: totals of nodes and racks."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from commands import ROOT
from hybrid3d.config import Machine, RecipeError, load_recipe
from hybrid3d.planning.hardware import GB, MACHINES, TERA, hardware_of

RECIPE = ROOT / "recipes/qwen3-8b.yaml"


def test_kinds_of_recipes_are_the_table() -> None:
    assert set(get_args(get_type_hints(Machine)["kind"])) == MACHINES.keys()


@pytest.mark.parametrize(
    ("kind", "gpus", "both_directions"),
    [("a100", 1, 0.6), ("h100", 1, 0.9), ("h200", 1, 0.9), ("b200", 8, 14.4), ("gb200", 72, 130), ("mi300x", 1, 0.896)],
)
def test_links_reach_the_published_totals(kind: str, gpus: int, both_directions: float) -> None:
    """TB/s of all GPUs of a system, in both directions: 1.8 for each of a DGX B200, 130 for a GB200 NVL72."""
    assert 2 * gpus * MACHINES[kind].nvlink_bandwidth == pytest.approx(both_directions * 1e12, rel=0.005)


def test_nvlink_5_has_18_links_of_50_gb_a_second() -> None:
    assert MACHINES["b200"].nvlink_bandwidth == MACHINES["gb200"].nvlink_bandwidth == 900 * GB


@pytest.mark.parametrize(
    ("kind", "gpus", "memory_tb", "memory_tb_per_s", "bf16_pflops", "fp8_pflops"),
    [("b200", 8, 1.44, 64, 36, 72), ("gb200", 72, 13.4, 576, 360, 720), ("mi300x", 8, 1.536, 42.4, 10.46, 20.92)],
)
def test_rates_reach_published_totals(
    kind: str, gpus: int, memory_tb: float, memory_tb_per_s: float, bf16_pflops: float, fp8_pflops: float
) -> None:
    """Data sheets give NVIDIA's PFLOP/s with sparsity, which doubles them; AMD's platform's are of dense matrices."""
    found, sparse = MACHINES[kind], 1 if kind == "mi300x" else 2
    assert gpus * found.memory_bytes == pytest.approx(memory_tb * 1e12, rel=0.002)
    assert gpus * found.memory_bandwidth == pytest.approx(memory_tb_per_s * 1e12)
    assert sparse * gpus * found.bf16_flops == pytest.approx(bf16_pflops * 1e15, rel=0.001)
    assert sparse * gpus * found.fp8_flops == pytest.approx(fp8_pflops * 1e15, rel=0.001)


@pytest.mark.parametrize(("kind", "gigabits"), [("a100", 200), ("h100", 400), ("b200", 400), ("gb200", 400)])
def test_network_is_one_adapter_for_each_gpu(kind: str, gigabits: int) -> None:
    assert MACHINES[kind].network_bandwidth * 8 == gigabits * 1e9


def test_longer_names_are_the_same_gpus() -> None:
    for long in ("a100-8x200g", "h100-8x400g", "h200-8x400g"):
        assert MACHINES[long] == MACHINES[long.partition("-")[0]]


def test_explicit_settings_win_over_the_kind() -> None:
    machine = load_recipe(RECIPE, ["machine.kind=b200", "machine.nvlink_gb_per_s=700", "machine.memory_gb=191"]).machine
    found = hardware_of(machine)
    assert (found.nvlink_bandwidth, found.memory_bytes) == (700 * GB, 191 * GB)
    assert (found.memory_bandwidth, found.network_bandwidth) == (8000 * GB, 50 * GB)
    assert (found.bf16_flops, found.fp8_flops) == (2250 * TERA, 4500 * TERA)


@pytest.mark.parametrize(("written", "meant"), [("b20", "b200"), ("gb2000", "gb200"), ("mi300", "mi300x")])
def test_unknown_kind_is_refused_with_the_meant_one(written: str, meant: str) -> None:
    with pytest.raises(RecipeError, match=rf"machine\.kind: expected one of .* did you mean {meant}\?"):
        load_recipe(RECIPE, [f"machine.kind={written}"])


def test_documentation_has_the_numbers_of_the_table() -> None:
    lines = (ROOT / "docs/planning.md").read_text().splitlines()
    rows = [line.split("|") for line in lines if line.startswith("| `") and "machine.kind" not in line]
    for row in rows:
        kinds, *numbers = (cell.strip() for cell in row[1:-1])
        values = [float(cell.split("=")[-1].replace(",", "").replace("-", "0")) for cell in numbers]
        for kind in kinds.replace("`", "").split(", "):
            has = MACHINES[kind]
            rates = (has.memory_bytes, has.memory_bandwidth, has.nvlink_bandwidth, has.network_bandwidth)
            assert values == [*(rate / GB for rate in rates), has.bf16_flops / TERA, has.fp8_flops / TERA]
    assert sum(len(row[1].split(",")) for row in rows) == len(MACHINES)

"""Every family in every pair of layouts: vLLM gets, bit for bit, what its own loader makes of the checkpoint.

pytest -m grid
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import DENSE, FAMILIES, LATENT, MORE, SPARSE
from grid import LAYOUTS, Cell, Grid, cells, rollout_of
from hybrid3d import families
from hybrid3d.config import Train
from hybrid3d.families import Config, Family
from hybrid3d.families.family import GroupedQKV, RowRange, SameTensor, StackedTensors

pytestmark = [pytest.mark.engines, pytest.mark.grid, pytest.mark.usefixtures("one_thread")]

WHOLE = ("qwen2", "deepseek_v3")  # of which make test has train layouts of all kinds; of other families the last two
# Of these families in make test-all alone: larger layouts have what these have
CONTAINED: list[dict[str, int]] = [
    *(dict(tp=2, dp=2), dict(pp=2, dp=2), dict(tp=2, pp=2), dict(pp=2, vpp=2, dp=2)),
    *(dict(pp=2, dp=2, first_stage_layers=1), dict(pp=2, dp=2, last_stage_layers=1)),
    *(dict(dp=4, ep=2), dict(tp=2, dp=2, ep=2)),
]
HARD = {
    "VPP",
    "uneven PP stages",
    "CP",
    "replicated KV heads",
    "fewer query groups than TP",
    "vocabulary padded by Megatron",
    "vocabulary padded by vLLM",
}
FEATURES = {
    DENSE: HARD | {"tied embeddings"},
    SPARSE: HARD
    | {"EP", "ETP", "ETP larger than TP", "router bias"}
    | {"expert-parallel rollout", "expert-parallel rollout over DP"},
}


@pytest.fixture(scope="module")
def grid(tiny_checkpoint: Callable[..., Path]) -> Grid:
    return Grid(tiny_checkpoint)


@pytest.mark.parametrize(
    ("family", "train"),
    [
        pytest.param(
            family, train, marks=[pytest.mark.slow] if (train in CONTAINED if family in WHOLE else i > 1) else []
        )
        for family in FAMILIES
        for i, train in enumerate(reversed(LAYOUTS[family][0]))
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{k}{v}" for k, v in value.items()),
)
def test_rollout_layouts_all_get_what_vllm_would_load(grid: Grid, family: str, train: dict[str, int]) -> None:
    for rollout in LAYOUTS[family][1]:
        cell = Cell(family, Train(**train), rollout_of(**rollout))
        proof = grid.prove(cell)
        assert proof.elements > 100_000
        assert proof.wrong == [], str(cell)
        assert proof.received_bytes == proof.lower_bound_bytes, str(cell)
        assert proof.network_bytes == proof.network_bound_bytes, str(cell)


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_only_generate_get_what_vllm_would_load(grid: Grid, family: str) -> None:
    """One train layout, and every rollout layout on ranks of their own; all train layouts are a slow test."""
    assert_split_layouts(grid, family, LAYOUTS[family][0][-1:])


@pytest.mark.slow
def test_split_layouts_all_get_what_vllm_would_load(grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    """All pairs of layouts with the engines on ranks of their own."""
    distinct = {digest for family in FAMILIES for digest in assert_split_layouts(grid, family, LAYOUTS[family][0])}
    with capsys.disabled():
        print(f"\n{len(distinct)} distinct pairs of layouts on different ranks")
    assert len(distinct) >= 200


def assert_split_layouts(grid: Grid, family: str, trains: list[dict[str, int]]) -> set[str]:
    digests = set()
    for train in trains:
        for rollout in LAYOUTS[family][1]:
            cell = Cell(family, Train(**train), rollout_of(**rollout))
            proof = grid.prove(cell, split=True)
            assert proof.wrong == [], str(cell)
            assert proof.elements > 100_000
            assert proof.received_bytes == proof.lower_bound_bytes, str(cell)
            assert proof.network_bytes == proof.network_bound_bytes, str(cell)
            digests.add(proof.digest)
    return digests


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in WHOLE else [pytest.mark.slow]) for family in FAMILIES]
)
def test_layer_of_each_kind_stands_for_all(grid: Grid, family: str) -> None:
    """Every train layout once, every rollout layout once."""
    trains, rollouts = LAYOUTS[family]
    for i, train in enumerate(trains):
        for rollout in rollouts if i == 0 else rollouts[:1]:
            cell = Cell(family, Train(**train), rollout_of(**rollout))
            assert grid.unlike_the_whole(cell) == [], str(cell)


@pytest.mark.slow
def test_grid_is_as_large_as_promised(grid: Grid, capsys: pytest.CaptureFixture[str]) -> None:
    """Layouts that differ in replicas only, as CP and DP do, count once; without the families of make test-all."""
    families = tuple(family for family in FAMILIES if family not in MORE)
    proofs = {cell: grid.prove(cell) for cell in cells(families)}
    distinct = {proof.digest: cell.family for cell, proof in proofs.items()}
    count = Counter(distinct.values())
    for families_of_a_kind, features in FEATURES.items():
        proven = [proof.features for cell, proof in proofs.items() if cell.family in families_of_a_kind]
        assert frozenset().union(*proven) == features
    with capsys.disabled():
        print("\n" + "\n".join(f"{family:12} {count[family]:4} distinct pairs of layouts" for family in families))
        print(f"{'all':12} {sum(count.values()):4}; {', '.join(sorted(set().union(*FEATURES.values())))}")
    assert min(count.values()) >= 40
    assert len(distinct) >= 300


class _Shifted(GroupedQKV):
    """Takes each key for that of the next query group."""

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        row_ranges = super().row_ranges(rows, config)
        height = sum(row_range.rows for row_range in row_ranges if row_range.name == self.k)
        return [
            dataclasses.replace(s, canonical_start=(s.canonical_start + s.rows) % height) if s.name == self.k else s
            for s in row_ranges
        ]


class _ShiftedHead(SameTensor):
    """Takes each head's rows for those of the next head."""

    def row_ranges(self, rows: int, config: Config) -> list[RowRange]:
        heads = config["num_attention_heads"]
        each = rows // heads
        return [RowRange(i * each, each, self.name, (i + 1) % heads * each) for i in range(heads)]


class _NextExpert(Family):
    def row_ranges(
        self, megatron_name: str, rows: int, config: Config, expert: int | None = None
    ) -> list[RowRange] | None:
        moved = None if expert is None else (expert + 1) % 8
        return super().row_ranges(megatron_name, rows, config, moved)


def swap_gate_and_up(family: Family) -> Family:
    swapped = {
        n: StackedTensors(m.names[::-1]) if isinstance(m, StackedTensors) else m for n, m in family.tensors.items()
    }
    return dataclasses.replace(family, tensors=swapped)


def shift_a_kv_head(family: Family) -> Family:
    def broken(name: str, row_map: Any) -> Any:
        if isinstance(row_map, GroupedQKV):
            return _Shifted(row_map.q, row_map.k, row_map.v)
        return _ShiftedHead(row_map.name) if name.endswith("linear_kv_up_proj.weight") else row_map

    return dataclasses.replace(family, tensors={n: broken(n, m) for n, m in family.tensors.items()})


def take_the_next_expert(family: Family) -> Family:
    return _NextExpert(**{f.name: getattr(family, f.name) for f in dataclasses.fields(family)})


def wrong_tables() -> Iterator[Any]:
    """Yield families with what is wrong in their tables: a dense family, one with experts and a latent one at first."""
    for family in FAMILIES:
        for broken in (swap_gate_and_up, shift_a_kv_head, *([take_the_next_expert] if family in SPARSE else [])):
            yield pytest.param(family, broken, marks=[] if family in (*WHOLE, "qwen3_moe") else [pytest.mark.slow])


@pytest.mark.parametrize(("family", "broken"), list(wrong_tables()))
def test_broken_table_is_seen(
    family: str, broken: Callable[[Family], Family], tiny_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(family, Train(tp=2, pp=2, ep=2 if family in SPARSE else 1), rollout_of(tp=2))
    assert Grid(tiny_checkpoint).prove(cell).wrong == []
    for architecture, table in families.FAMILIES.items():
        monkeypatch.setitem(families.FAMILIES, architecture, broken(table))
    wrong = Grid(tiny_checkpoint).prove(cell).wrong
    part = {swap_gate_and_up: "gate_up_proj", shift_a_kv_head: "kv_b_proj" if family in LATENT else "qkv_proj"}
    assert any(part.get(broken, "experts") in name or "w13_weight" in name for name in wrong)

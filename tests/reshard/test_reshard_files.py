"""Checkpoint files against the libraries that define them: safetensors, huggingface_hub and transformers."""

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save, save_file

from hybrid3d.reshard import ends, files
from hybrid3d.reshard.file_index import CheckpointError, TensorEntry
from hybrid3d.reshard.files import CheckpointReader
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import FILES, Demand, Fill, Holdings, Piece, View
from hybrid3d.reshard.plan.planner import PlanError, make_plan
from test_reshard_box import Side, box_in, index, random_grid
from test_reshard_executor import by_element, memories, write_pieces

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
NamedTensors = dict[str, torch.Tensor]


def same(a: NamedTensors, b: NamedTensors) -> bool:
    """Return whether names, shapes, dtypes and bits are equal."""
    return a.keys() == b.keys() and all(
        (t.shape, t.dtype) == (b[n].shape, b[n].dtype) and by_element(t).equal(by_element(b[n])) for n, t in a.items()
    )


# Every dtype of a checkpoint, odd lengths and a scalar, in an order in which a plain layout would not be aligned.
SHAPES = {
    "fp8": ((3, 5), torch.float8_e4m3fn),
    "half": ((7,), torch.float16),
    "weight": ((10, 6), torch.bfloat16),
    "bias": ((5,), torch.float32),
    "double": ((2, 3, 2), torch.float64),
    "scalar": ((), torch.bfloat16),
}
RANDOM = torch.Generator().manual_seed(1)
MIXED = {name: torch.randn(shape, generator=RANDOM).to(dtype) for name, (shape, dtype) in SHAPES.items()}


def entries_of(tensors: NamedTensors, max_file_bytes: int = 10**9) -> dict[str, TensorEntry]:
    shapes = {n: (tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in tensors.items()}
    return files.shard_entries(shapes, max_file_bytes)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixed")
    save_file(MIXED, folder / SINGLE_FILE)
    return folder


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NamedTensors]:
    """Return the folder of a tiny model, saved by transformers in several files, and its state dict."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("sharded")
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **sizes)).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="12KB")
    return folder, dict(model.state_dict())


def test_index_of_one_file_is_what_safetensors_says(mixed: Path) -> None:
    dtypes = {n: str(t.dtype).removeprefix("torch.") for n, t in MIXED.items()}
    with safetensors.safe_open(mixed / SINGLE_FILE, framework="pt") as opened:
        shapes = {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    assert files.read_index(mixed) == {n: TensorEntry(SINGLE_FILE, shapes[n], dtypes[n]) for n in shapes}
    assert shapes.keys() == MIXED.keys()


def test_index_of_several_files_is_transformers_own(sharded: tuple[Path, NamedTensors]) -> None:
    folder, state = sharded
    theirs = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    assert len(set(theirs.values())) > 2
    entries = files.read_index(folder)
    assert {n: e.file for n, e in entries.items()} == theirs
    assert {n: (e.shape, e.dtype) for n, e in entries.items()} == {n: (t.shape, "bfloat16") for n, t in state.items()}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_slice_has_the_right_bits(mixed: Path, data: st.DataObject) -> None:
    entries = files.read_index(mixed)
    with CheckpointReader(mixed, entries) as reader:
        for whole in files.file_pieces(entries):
            box = data.draw(box_in(whole.box))
            read = reader.read(whole.restrict(box))
            assert same({"read": read}, {"read": MIXED[whole.name][index(box)]})


class Recorded:
    """A `safe_open` that counts the elements that are read of every tensor."""

    elements: ClassVar[Counter[str]]

    def __init__(self, *args: Any, **kwargs: Any):
        self._opened = safetensors.safe_open(*args, **kwargs)
        self.keys = self._opened.keys

    def __enter__(self) -> "Recorded":
        return self

    def __exit__(self, *exc: object) -> None:
        self._opened.__exit__(*exc)

    def get_slice(self, name: str) -> Any:
        part = self._opened.get_slice(name)

        class Slice:
            get_shape, get_dtype = part.get_shape, part.get_dtype

            def __getitem__(self, where: tuple[slice, ...]) -> torch.Tensor:
                Recorded.elements[name] += part[where].numel()
                return part[where]

        return Slice()


def test_rank_reads_only_what_it_wants(sharded: tuple[Path, NamedTensors], monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of two pipeline stages and TP ranks loads rows, columns, a strided view, another dtype and padding."""
    monkeypatch.setattr(files, "safe_open", Recorded)
    monkeypatch.setattr(Recorded, "elements", Counter(), raising=False)
    folder, state = sharded
    layer, side = "model.layers.1.", Side(1)
    side.add(0, layer + "mlp.gate_proj.weight", Box((24, 0), (24, 32)), "bfloat16")
    side.add(0, layer + "mlp.down_proj.weight", Box((0, 24), (32, 24)), "bfloat16", order=(1, 0), gap=2)
    side.add(0, layer + "input_layernorm.weight", Box((0,), (32,)), "float32")
    side.add(0, "lm_head.weight", Box((26, 0), (24, 32)), "bfloat16")
    end = side.length[0, "bfloat16"]
    side.length[0, "bfloat16"] += 64
    memory, expected = memories(side, 0, 7.0), memories(side, 0, 7.0)
    write_pieces(side.pieces[0], state, expected)
    expected["bfloat16"][end:] = 0
    padding = Fill(View("bfloat16", end, (32, 1)), (2, 32), 0.0)
    files.load_files(folder, Demand(tuple(side.pieces[0]), (padding,)), memory, rank=0)
    assert same(memory, expected)
    assert Recorded.elements == {p.name: p.box.numel for p in side.pieces[0]}


def held_by_four(tensors: NamedTensors) -> tuple[dict[int, Holdings], list[NamedTensors]]:
    """Divide tensors at random over four ranks, some boxes on two of them; return the ranks' pieces and memories."""
    random, side = Random(2), Side(4)
    for name, tensor in tensors.items():
        for box in random_grid(random, tuple(tensor.shape)):
            for rank in random.sample(range(4), random.randint(1, 2)):
                order = tuple(random.sample(range(tensor.ndim), tensor.ndim))
                side.add(rank, name, box, str(tensor.dtype).removeprefix("torch."), order)
    memory = [memories(side, rank, 0.0) for rank in range(4)]
    for rank in range(4):
        write_pieces(side.pieces[rank], tensors, memory[rank])
    return {rank: Holdings(tuple(pieces)) for rank, pieces in side.pieces.items()}, memory


def export(folder: Path, tensors: NamedTensors, max_file_bytes: int = 10**9) -> dict[str, TensorEntry]:
    entries, (holdings, memory) = entries_of(tensors, max_file_bytes), held_by_four(tensors)
    files.create_files(folder, entries)
    for rank in (2, 0, 3, 1):  # ranks come as they come
        files.export_files(folder, entries, holdings, ends.NamedTensors(memory[rank]), rank)
    return entries


@pytest.mark.parametrize("max_file_bytes", [10**9, 100])
def test_export_by_four_holders_writes_every_dtype(tmp_path: Path, max_file_bytes: int) -> None:
    tensors = {**MIXED, "nothing": torch.zeros(0, 4)}
    entries = export(tmp_path, tensors, max_file_bytes)
    written = sorted(tmp_path.glob("*.safetensors"))
    assert {f.name for f in written} == {e.file for e in entries.values()}
    assert len(written) == (1 if max_file_bytes == 10**9 else 4)
    assert same({n: t for f in written for n, t in load_file(f).items()}, tensors)
    assert files.read_index(tmp_path) == entries
    for f in written:
        with safetensors.safe_open(f, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}  # transformers insists on it


def test_transformers_reads_an_export_and_gets_the_same_model(
    sharded: tuple[Path, NamedTensors], tmp_path: Path
) -> None:
    from transformers import Qwen2ForCausalLM

    folder, state = sharded
    export(tmp_path, state, 12_000)
    assert len(json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]) == len(state)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model, info = Qwen2ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert same(dict(model.state_dict()), state)


def test_files_are_divided_and_named_as_the_hub_does(tmp_path: Path) -> None:
    from huggingface_hub import split_torch_state_dict_into_shards

    tensors = {f"t{i}": torch.zeros(n) for i, n in enumerate([30, 20, 50, 1, 49, 1, 10])}
    for limit in (200, 204, 400, 1000):  # 5, 4, 2 files and 1
        theirs = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
        entries = entries_of(tensors, limit)
        assert {n: e.file for n, e in entries.items()} == theirs.tensor_to_filename
        files.create_files(tmp_path / str(limit), entries)
        if len(theirs.filename_to_tensors) > 1:
            index = json.loads((tmp_path / str(limit) / INDEX_FILE).read_text())
            assert index == {"metadata": theirs.metadata, "weight_map": theirs.tensor_to_filename}
        else:
            assert not (tmp_path / str(limit) / INDEX_FILE).exists()
    assert [e.file for e in entries_of({"a": torch.zeros(9), "b": torch.zeros(1)}, 8).values()] == [
        "model-00001-of-00002.safetensors",  # larger than a file may be: alone
        "model-00002-of-00002.safetensors",
    ]


def test_files_are_zero_and_whole_before_anyone_writes(tmp_path: Path) -> None:
    files.create_files(tmp_path, entries_of(MIXED))
    zeros = {n: torch.zeros_like(t) for n, t in MIXED.items()}
    assert same(load_file(tmp_path / SINGLE_FILE), zeros)
    assert same(files.open_for_writing(tmp_path, entries_of(MIXED)), zeros)


def test_replicas_share_the_writing() -> None:
    entries = {f"t{i}": TensorEntry(SINGLE_FILE, (10,), "float32") for i in range(8)}
    everything = Holdings(files.file_pieces(entries))
    plan = make_plan(dict.fromkeys(range(4), everything), {FILES: Demand(everything.pieces)}, 1)
    assert {rank: part.local_bytes for rank, part in plan.items()} == dict.fromkeys(range(4), 80) | {FILES: 8 * 40}


def weight_map(content: Any) -> bytes:
    return json.dumps({"weight_map": content}).encode()


WHOLE = save({"bias": torch.zeros(5)})
NO_INDEX = rf"{INDEX_FILE} is not a valid checkpoint index"
CUT = rf"{SINGLE_FILE} is damaged or truncated"


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (SINGLE_FILE, None, rf"{SINGLE_FILE} does not exist"),
        (SINGLE_FILE, WHOLE[:-1], rf"{CUT} \({len(WHOLE) - 1} bytes\)"),
        (SINGLE_FILE, WHOLE[:20], CUT),
        (SINGLE_FILE, b"", CUT),
        (SINGLE_FILE, b"no tensors here" * 9, CUT),
        (SINGLE_FILE, (9).to_bytes(8, "little") + b"[1, 2, 3]", CUT),
        (SINGLE_FILE, save({"ids": torch.arange(3)}), rf"{SINGLE_FILE}: ids has dtype I64; supported are F64, F32"),
        (INDEX_FILE, weight_map({"bias": "gone.safetensors"}), r"gone\.safetensors does not exist"),
        (
            INDEX_FILE,
            weight_map({"bias": SINGLE_FILE, "q": SINGLE_FILE}),
            rf"{INDEX_FILE} names 1 tensors that are not in its files: \['q'\]",
        ),
        (INDEX_FILE, b"{", NO_INDEX),
        (INDEX_FILE, b"{}", NO_INDEX),
        (INDEX_FILE, weight_map(["bias"]), NO_INDEX),
        (INDEX_FILE, weight_map(None), NO_INDEX),
    ],
)
def test_unreadable_checkpoint_names_the_file(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(WHOLE)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        files.load_files(tmp_path, Demand(()), {}, rank=0)
    assert str(tmp_path) in str(caught.value)


def test_index_decides_which_of_two_files_a_tensor_is_in(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(2), "b": torch.ones(2)}, tmp_path / "2.safetensors")  # as an editing tool may leave it
    (tmp_path / INDEX_FILE).write_bytes(weight_map({"a": "1.safetensors", "b": "2.safetensors"}))
    assert {n: e.file for n, e in files.read_index(tmp_path).items()} == {"a": "1.safetensors", "b": "2.safetensors"}


def test_missing_tensors_are_named(mixed: Path, tmp_path: Path) -> None:
    wanted = Piece("missing.weight", Box.full((2, 2)), View("local", 0, (2, 1)), "float32")
    with pytest.raises(PlanError, match=r"missing\.weight \[0, 0\] \+ \[2, 2\], wanted by rank 3"):
        files.load_files(mixed, Demand((wanted,)), {"local": torch.zeros(4)}, rank=3)
    larger = Piece("bias", Box.full((9,)), View("local", 0, (1,)), "float32")
    with pytest.raises(PlanError, match=r"bias \[5\] \+ \[4\]"):
        files.load_files(mixed, Demand((larger,)), {"local": torch.zeros(9)}, rank=0)
    entries = entries_of(MIXED)
    files.create_files(tmp_path, entries)
    with pytest.raises(PlanError, match="6 wanted tensors are held by no rank in full"):
        files.export_files(tmp_path, entries, {0: Holdings(())}, ends.NoSource(), rank=0)


def test_export_never_overwrites_a_checkpoint(mixed: Path) -> None:
    before = (mixed / SINGLE_FILE).read_bytes()
    with pytest.raises(FileExistsError, match=f"{mixed} holds a checkpoint already"):
        files.create_files(mixed, entries_of({"a": torch.zeros(2)}))
    assert (mixed / SINGLE_FILE).read_bytes() == before

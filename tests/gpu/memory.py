"""Memory: arenas that are released between uses, pinned offload, out of memory, and the memory that a plan predicts."""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from gpu import one_rank
from gpu.models import SIZES
from gpu.record import Record
from hybrid3d.certify.tiny_models import write_checkpoint
from hybrid3d.config import Rollout
from hybrid3d.planning.memory import count_parameters, estimate_stages
from hybrid3d.reshard.move.device import synchronize
from hybrid3d.reshard.move.memory import DeviceBuffer
from hybrid3d.rl.batch import Batch
from hybrid3d.rl.objective import sft_loss
from hybrid3d.run.folder import RunFolder
from hybrid3d.run.oom_recovery import OomRecovery, OutOfMemoryRestart, find_out_of_memory
from hybrid3d.train.offload import OffloadableMemory

ROUNDS = 20
MIB = 1 << 20
ARENA_BYTES = {"cuda": 256 * MIB, "cpu": 8 * MIB}
OFFLOADED_BYTES = {"cuda": 1024 * MIB, "cpu": 32 * MIB}

# A model whose step takes some GB, so that what a plan leaves out (statistics of norms, workspaces) does not count
LENGTH = 1024
MEDIUM = SIZES | dict(
    architectures=["Qwen2ForCausalLM"],
    model_type="qwen2",
    use_sliding_window=False,
    vocab_size=8192,
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    max_position_embeddings=LENGTH,
)
PERSISTENT_TOLERANCE, PEAK_TOLERANCE = 0.1, 0.25


def arenas(record: Record, device: str) -> None:
    """Release and allocate a `DeviceBuffer` again and again; views made once must follow it to its new memory."""
    before = _allocated(device)
    buffer = DeviceBuffer(ARENA_BYTES[device], device)
    numbers = buffer.flat_view(0, buffer.nbytes, torch.float32)
    column = numbers.view(-1, 1024)[:, 5]
    halves = buffer.flat_view(buffer.nbytes // 2, buffer.nbytes // 2, torch.bfloat16)
    addresses, freed = set(), set()
    began = time.perf_counter()
    for number in range(ROUNDS):
        buffer.release()
        freed.add(before + buffer.nbytes - _allocated(device))
        neighbour = torch.empty(buffer.nbytes, dtype=torch.uint8, device=device) if number % 2 else None
        buffer.allocate()
        numbers.fill_(number)
        halves.fill_(-1.5)
        middle = len(column) // 2
        assert bool((column[:middle] == number).all()), f"round {number}: a strided view shows other memory"
        assert bool((halves == -1.5).all()), f"round {number}: a view of another dtype shows other memory"
        # Two bfloat16 of -1.5 (0xBFC0) read as one float32
        expected = torch.tensor([-1.5, -1.5], dtype=torch.bfloat16).view(torch.float32).item()
        assert bool((column[middle:] == expected).all()), f"round {number}: two views do not share memory"
        addresses.add(numbers.data_ptr())
        del neighbour
    record(nbytes=buffer.nbytes, addresses=len(addresses), milliseconds_a_round=_ms(began, ROUNDS))
    if device == "cuda":
        record(freed_bytes=sorted(freed))
        assert freed == {buffer.nbytes}, f"releasing {buffer.nbytes} bytes frees {sorted(freed)}"
        assert len(addresses) > 1, "the buffer never moved, so that nothing was shown about its views"


def offload(record: Record, device: str) -> None:
    """Offload tensors to pinned host memory and back, bit for bit, and measure the bandwidth."""
    torch.manual_seed(1)
    count = OFFLOADED_BYTES[device] // 8
    weights = torch.randn(count, device=device).bfloat16()
    view = weights.view(-1, 64)[3:, 1:]  # shares the storage, and is offloaded with it
    state, gradients = torch.randn(count, device=device), torch.ones(count, device=device)
    kept = [weights.clone(), state.clone()]
    kinds = {"parameters": [weights, view], "optimizer": [state], "gradients": [gradients]}
    memory, full = OffloadableMemory(), _allocated(device)
    for number in range(3):  # the first time, the host's memory is allocated and pinned
        began = time.perf_counter()
        nbytes = memory.offload({kind: partial(list, tensors) for kind, tensors in kinds.items()})
        away = time.perf_counter() - began
        assert nbytes == sum(t.nbytes for t in (weights, state, gradients)), f"offloaded {nbytes} bytes"
        assert weights.untyped_storage().nbytes() == 0, "the storage was not emptied"
        if device == "cuda":
            freed = full - _allocated(device)
            assert freed == nbytes, f"offloading {nbytes} bytes freed {freed}"
        began = time.perf_counter()
        memory.onload()
        back = time.perf_counter() - began
        assert not one_rank.bits_differ(weights, kept[0]), "parameters came back with other bits"
        assert not one_rank.bits_differ(state, kept[1]), "optimizer state came back with other bits"
        assert view.data_ptr() == weights.data_ptr() + (3 * 64 + 1) * 2, "a view does not follow its storage"
        moved = weights.nbytes + state.nbytes
        record(**{f"away_gb_per_s_{number}": round(moved / away / 1e9, 2)})
        record(**{f"back_gb_per_s_{number}": round(moved / back / 1e9, 2)})
    record(offloaded_bytes=nbytes)


def out_of_memory(record: Record, device: str) -> None:
    """Run out of GPU memory; the error must lead to a restart with smaller settings, and memory be usable again."""
    blocks: list[torch.Tensor] = []
    try:
        while True:
            blocks.append(torch.empty(1 << 30, dtype=torch.uint8, device=device))
    except RuntimeError as error:
        raised = error
    record(error=type(raised).__name__, allocated_gib=len(blocks))
    cause = find_out_of_memory(raised)
    assert cause is not None, f"recovery does not recognize {type(raised).__name__}: {raised}"
    recipe = one_rank.recipe_for(Path("model"), "bfloat16", micro_batch_size=8)
    with tempfile.TemporaryDirectory() as path:
        restart = OomRecovery().prepare_restart(str(cause), recipe, RunFolder(Path(path)), 0)
        assert isinstance(restart, OutOfMemoryRestart), f"no restart was prepared: {restart}"
        settings = OomRecovery.from_folder(RunFolder(Path(path))).settings
    record(settings=dict(settings))
    assert settings.get("train.micro_batch_size") == 4, (
        f"the restart has {dict(settings)}, expected half the micro batch"
    )
    del raised
    blocks.clear()
    torch.cuda.empty_cache()
    assert torch.ones(1 << 28, device=device).sum().item() == 1 << 28, "memory is not usable afterwards"


def planned_memory(record: Record, device: str) -> None:
    """Measure the GPU memory of training steps, and compare it with what `hybrid3d plan` predicts."""
    with tempfile.TemporaryDirectory() as path:
        folder = write_checkpoint(Path(path), MEDIUM)
        one_rank.start()
        rollout = Rollout(max_model_len=LENGTH, max_new_tokens=8)
        recipe = one_rank.recipe_for(folder, "bfloat16", rollout=rollout)
        before = torch.cuda.memory_allocated()
        policy = one_rank.make_policy(MEDIUM, recipe)
    held = count_parameters(policy.weights.pieces, lambda name: 1)
    (planned,) = estimate_stages(recipe, MEDIUM, [held], wanted_bytes=0, finalize_bytes=0)
    tokens = torch.randint(3, MEDIUM["vocab_size"], (one_rank.MICRO_BATCH, LENGTH)).tolist()
    batch = Batch.from_sequences(tokens, [1] * len(tokens), pad_id=0)
    for _ in range(2):  # the optimizer's state appears with the first update
        torch.cuda.reset_peak_memory_stats()
        policy.train_step(batch, sft_loss, recipe)
    synchronize()
    persistent, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    record(persistent_bytes=persistent, planned_persistent_bytes=planned.persistent)
    record(peak_bytes=peak, planned_peak_bytes=planned.persistent + planned.activations)
    _expect_near("persistent", persistent, planned.persistent, PERSISTENT_TOLERANCE)
    _expect_near("peak", peak, planned.persistent + planned.activations, PEAK_TOLERANCE)


def _expect_near(what: str, measured: int, planned: int, tolerance: float) -> None:
    ratio = measured / planned
    message = f"{what}: {measured} bytes measured, {planned} planned: expected within {tolerance:.0%} of it"
    assert abs(ratio - 1) <= tolerance, message


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _ms(began: float, rounds: int) -> float:
    return round((time.perf_counter() - began) / rounds * 1e3, 3)

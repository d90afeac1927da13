"""vLLM's sleep and wake-up by tag, under a CUDA graph that reads weights which are written in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu.record import Record
from gpu.sleep_allocator import load_sleep_allocator
from hybrid3d.run.oom_recovery import find_out_of_memory

SIZE = 8192
CACHE_BYTES = 256 << 20
ROUNDS = 3
KEPT = ("runtime", "cudagraph")  # what vLLM's level 2 keeps, in `sleep_mode_backend.py`


def sleep_graph(record: Record, device: str) -> None:
    """Put weights and a KV cache to sleep as `RolloutEngine.sleep` does, wake them one by one, and replay a graph."""
    allocator = load_sleep_allocator()
    torch.manual_seed(1)
    inputs = torch.randn(16, SIZE, dtype=torch.bfloat16, device=device)
    outputs = torch.empty_like(inputs)
    with allocator.use_memory_pool("weights"):
        weights = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device)
    with allocator.use_memory_pool("kv_cache"):
        cache = torch.zeros(CACHE_BYTES, dtype=torch.uint8, device=device)

    def forward() -> None:
        torch.matmul(inputs, weights, out=outputs)
        cache.add_(1)

    graphs = {"torch": _capture(forward)}
    with allocator.cudagraph_pool() as pool:  # vLLM's option to let graphs' own memory sleep, too
        graphs["vllm"] = _capture(forward, pool)
    addresses = weights.data_ptr(), cache.data_ptr()
    for number in range(ROUNDS):
        torch.cuda.synchronize()
        awake = torch.cuda.mem_get_info()[0]
        allocator.sleep(offload_tags=KEPT)
        asleep = torch.cuda.mem_get_info()[0]
        freed = asleep - awake
        assert freed >= weights.nbytes + cache.nbytes, f"round {number}: sleeping freed {freed} bytes"
        allocator.wake_up(tags=["weights"])
        taken = asleep - torch.cuda.mem_get_info()[0]
        assert weights.nbytes <= taken < weights.nbytes + cache.nbytes, f"waking the weights took {taken} bytes"
        fresh = torch.randn(SIZE, SIZE, dtype=torch.bfloat16, device=device)
        weights.copy_(fresh)
        allocator.wake_up(tags=["kv_cache"])
        exact = inputs.float() @ fresh.float()
        for name, graph in graphs.items():
            cache.fill_(number)
            outputs.zero_()
            graph.replay()
            torch.cuda.synchronize()
            error = float((outputs.float() - exact).abs().max() / exact.abs().max())
            assert error < 2e-2, f"round {number}: a graph in {name}'s pool read other weights: error {error:.2e}"
            assert bool((cache == number + 1).all()), (
                f"round {number}: a graph in {name}'s pool did not write the cache"
            )
        assert (weights.data_ptr(), cache.data_ptr()) == addresses, "waking moved memory to another address"
        record(rounds=number + 1, freed_bytes=freed, weights_bytes=weights.nbytes, error=error)


def _capture(forward: Callable[[], None], pool: Any = None) -> torch.cuda.CUDAGraph:
    """Capture a function in a CUDA graph, after a run on a side stream, as torch's documentation advises."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        forward()
    return graph


def wake_out_of_memory(record: Record, device: str) -> None:
    """Wake memory for which there is no room: the allocator's error must be recognized as out of memory."""
    allocator = load_sleep_allocator()
    with allocator.use_memory_pool("weights"):
        weights = torch.zeros(1 << 30, dtype=torch.uint8, device=device)
    allocator.sleep(offload_tags=KEPT)
    free = torch.cuda.mem_get_info()[0]
    blocks = [torch.empty(free - (weights.nbytes >> 1), dtype=torch.uint8, device=device)]
    try:
        allocator.wake_up(tags=["weights"])
    except Exception as error:  # of which kind it is, is what this check finds out
        raised = error
    else:
        raise AssertionError(f"{weights.nbytes} bytes were woken beside {blocks[0].nbytes} of {free} free ones")
    cause = find_out_of_memory(raised)
    record(error=type(raised).__name__, message=str(raised).strip()[:200], cause=cause)
    assert cause is not None, f"recovery does not recognize {type(raised).__name__}: {raised}"

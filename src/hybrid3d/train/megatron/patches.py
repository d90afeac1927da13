"""Every change that hybrid3d makes to Megatron-Core's code at run time."""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch
import torch.distributed as dist

from hybrid3d.patches import Patch
from hybrid3d.process import kill_when_parent_exits
from hybrid3d.train.megatron import cpu
from hybrid3d.train.megatron.versions import MEGATRON

START_SECONDS = 10  # in which a process that writes must have started
START_TRIES = 6


def sizes_as_numbers(to_cpu: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `token_dispatcher.maybe_move_tensor_to_cpu`: convert also tensors that are on the CPU already."""

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = to_cpu(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and isinstance(moved, torch.Tensor) else moved

    return to_host


def gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `mappings._gather_along_first_dim`: pad the shares to the longest, and gather these."""

    def gathered(
        input_: torch.Tensor, group: dist.ProcessGroup, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            found: torch.Tensor = gather(input_, group, output_split_sizes, use_global_buffer)
            return found
        rows = max(output_split_sizes)
        shares = input_.new_empty(group.size(), rows, *input_.shape[1:])
        shares[group.rank(), : len(input_)] = input_
        dist.all_gather(list(shares), shares[group.rank()].clone(), group=group)
        return torch.cat([share[:n] for share, n in zip(shares, output_split_sizes, strict=True)])

    return gathered


def keep_adam_steps(set_states: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `DistributedOptimizer._set_main_param_and_optimizer_states`: leave each parameter's step as it is."""

    def set_states_but_steps(self: Any, model_param: Any, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        set_states(self, model_param, {**tensors, "step": state["step"]} if "step" in state else tensors)

    return set_states_but_steps


def count_tokens(apply_expert_bias: Callable[..., Any]) -> Callable[..., Any]:
    """Replace `TopKRouter._apply_expert_bias`: the mask of padding gets a dimension for the experts."""

    def counted(router: Any, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        apply_expert_bias(router, routing_map, None if padding_mask is None else padding_mask.unsqueeze(-1))

    return counted


def duplicated_linear(original: Any) -> type[torch.nn.Module]:
    """Replace `multi_latent_attention.TELinear`, the linear that compresses keys and queries."""
    from hybrid3d.train.megatron.cpu import DuplicatedLinear

    return DuplicatedLinear


def write_by_processes(original: Any) -> staticmethod[..., None]:
    """Replace `FileSystemWriterAsync.write_preloaded_data_multiproc`; its arguments are Megatron's."""
    return staticmethod(_write_by_processes)


def _write_by_processes(
    transforms: list[Any], msc: bool, rank: int, buckets: list[Any], results: queue.Queue[Any]
) -> None:
    """Write each bucket, a file, in a forked process, so that training has the interpreter to itself."""
    started, written = [], {}
    try:
        for number, bucket in enumerate(buckets):
            started.append(_start_writer(transforms, number, bucket))
        for number, (process, receiver) in enumerate(started):
            try:
                written[number] = receiver.recv()
            except (EOFError, OSError):  # killed before it reported, or while it did
                process.join()
                file = buckets[number][0]
                written[number] = OSError(f"the process that wrote {file} ended with code {process.exitcode}")
    finally:
        for process, receiver in started:
            receiver.close()  # a process that still reports gets an error, and ends
            process.join()
    results.put(next((result for result in written.values() if isinstance(result, Exception)), written))


def _start_writer(transforms: list[Any], number: int, bucket: Any) -> tuple[ForkProcess, Connection]:
    """Start a process that writes a bucket; return it, and the connection on which it reports the result.

    The fork of a process with threads may never reach its first line, where another thread held a lock when it was
    forked, as in CPython 3.11 that of the list of threads (https://github.com/python/cpython/issues/112275). Such a
    process has done nothing yet, so another is started.
    """
    context = multiprocessing.get_context("fork")
    for _ in range(START_TRIES):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_write_bucket, args=(os.getpid(), transforms, number, bucket, sender))
        process.start()
        sender.close()
        if receiver.poll(START_SECONDS):
            with suppress(EOFError, OSError):  # it has been killed, which the next `recv` finds too
                receiver.recv()
            return process, receiver
        process.kill()
        process.join()
        receiver.close()
    raise OSError(f"no process to write {bucket[0]} has started in {START_TRIES} x {START_SECONDS} seconds")


def _write_bucket(rank: int, transforms: list[Any], number: int, bucket: Any, sender: Connection) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    kill_when_parent_exits(rank)  # it has the rank's memory, that of a GPU too
    sender.send("started")
    gc.disable()  # garbage of the rank may lie on its GPU, which a fork must not touch
    results, count = queue.Queue[Any](), queue.Queue[int]()
    count.put(number)
    FileSystemWriterAsync.write_preloaded_data(transforms, number, bucket, results, count, True)
    _, result = results.get()
    if isinstance(result, Exception) and not isinstance(result, OSError):
        result = OSError(f"{type(result).__name__}: {result}")  # other exceptions may not survive the pipe
    sender.send(result)


def new_results_queue() -> None:
    """Have Megatron report what a checkpoint's processes wrote in a new queue of this process.

    Megatron's own queue is in a manager process next to each rank, which survives when the rank is killed.
    """
    RESULTS.replace(queue.Queue())


@contextmanager
def without_streams() -> Iterator[None]:
    """Let Megatron build models on meta, on a machine with GPUs, without making a CUDA stream.

    A stream makes a context on the current GPU, which before the ranks are bound to theirs is GPU 0 for all of them.
    The dispatcher would also keep that stream in its class, for the model that is trained on another GPU later.
    """
    with STREAM.replaced(cpu.Stream()):
        yield


def _patch(
    target: str,
    reason: str,
    test: str,
    replacement: Callable[[Any], Any] | None = None,
    may_be_undefined: bool = False,
) -> Patch:
    return Patch(f"megatron.core.{target}", MEGATRON, reason, f"tests/{test}", replacement, may_be_undefined)


STREAM = _patch(
    "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
    "It makes a stream, and with it a CUDA context on GPU 0, also where Megatron is only queried (`without_streams`).",
    "planning/test_queries_on_cuda.py",
)
RESULTS = _patch(
    "dist_checkpointing.strategies.filesystem_async._results_queue",
    "It is in a manager process next to each rank, which survives when the rank is killed (`new_results_queue`).",
    "train/test_checkpoint_writing.py",
)

MODEL = (
    _patch(
        "transformer.moe.router.TopKRouter._apply_expert_bias",
        "The mask of padding lies along the experts: padding counts like tokens (NVIDIA/Megatron-LM#6111).",
        "train/test_megatron.py",
        count_tokens,
    ),
)

CHECKPOINT = (
    _patch(
        "dist_checkpointing.strategies.filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc",
        "It waits without end for a process that was killed while it wrote.",
        "train/test_checkpoint_writing.py",
        write_by_processes,
    ),
    RESULTS,
    _patch(
        "dist_checkpointing.strategies.filesystem_async._process_memory",
        "It needs psutil, which Megatron-Core does not require, for a number that it only logs.",
        "doctor/test_doctor_checks.py",
        lambda original: lambda: 0,
    ),
)

ON_CPU = (
    _patch(
        "tensor_parallel.random._set_cuda_rng_state",
        "There is no CUDA random state.",
        "train/test_megatron.py",
        lambda original: lambda state, device=-1, graph_safe=False: torch.set_rng_state(state),
    ),
    _patch(
        "tensor_parallel.random._get_cuda_rng_state",
        "There is no CUDA random state.",
        "train/test_megatron.py",
        lambda original: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    ),
    _patch(
        "transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        "The sizes of an all-to-all must be numbers; tensors that are on the CPU already are not converted.",
        "whole_runs/test_sparse_train.py",
        sizes_as_numbers,
    ),
    _patch(
        "transformer.moe.token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream",
        "There is one stream; vLLM replaces `torch.cuda.Stream` by its own later.",
        "whole_runs/test_sparse_train.py",
        lambda original: cpu.Stream(),
    ),
    _patch(
        "tensor_parallel.mappings._gather_along_first_dim",
        "Experts get different numbers of tokens, and gloo gathers equal shares only.",
        "whole_runs/test_sparse_train.py",
        gather_uneven,
    ),
)

WITHOUT_TRANSFORMER_ENGINE = (
    _patch(
        "transformer.moe.moe_utils.te_general_gemm",
        "The router compares it with None, and it is not defined without Transformer Engine.",
        "whole_runs/test_sparse_train.py",
        lambda original: original,
        may_be_undefined=True,
    ),
    _patch(
        "transformer.multi_latent_attention.HAVE_TE",
        "Where it is set, `isinstance` of a stand-in for a Transformer Engine class raises TypeError.",
        "train/test_megatron.py",
        lambda original: False,
    ),
    _patch(
        "transformer.multi_latent_attention.TELinear",
        "Of all linears it allows only this class to be whole on every TP rank.",
        "train/test_megatron.py",
        duplicated_linear,
    ),
)

QUERIED = (STREAM,)

WITH_TORCH_ADAM = (
    _patch(
        "optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
        "Adam of torch counts steps in a tensor per parameter, which Megatron saves and loads apart, then misses.",
        "train/test_megatron.py",
        keep_adam_steps,
    ),
)

ALL = (*MODEL, *CHECKPOINT, *ON_CPU, *WITHOUT_TRANSFORMER_ENGINE, *QUERIED, *WITH_TORCH_ADAM)

"""Faults that the audit must find: each is put into the CUDA environment on purpose by `--inject NAME`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        check: the module of the check that must find it.
        what: what is wrong.
        found: a pattern that one of the facts not proven must have, in its subject or what was found.
        make: puts it there; its arguments are what the check hands over.
        part: of the check that must find it, if it has several.
        family: of the model in which it must be found.
    """

    check: str
    what: str
    found: str
    make: Callable[..., None]
    part: str | None = None
    family: str = "qwen2"

    def matches(self, text: str) -> bool:
        return re.search(self.found, text) is not None


def inject(name: str | None, check: str, *arguments: Any) -> None:
    """Make the fault of this name if it is one for this check."""
    if name is not None and FAULTS[name].check == check:
        FAULTS[name].make(*arguments)


def _wrap(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Have a function called with the same arguments before another one."""
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _rename_private_function() -> None:
    from vllm.model_executor.model_loader.reload import sanitize

    sanitize.restore_references = sanitize.restore_layer_refs
    del sanitize.restore_layer_refs


def _swap_keys_and_values() -> None:
    from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM

    load = Qwen2ForCausalLM.load_weights
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}

    def swapped(self: Any, weights: Any) -> Any:
        return load(self, ((re.sub("[kv]_proj", lambda m: other[m[0]], name), tensor) for name, tensor in weights))

    Qwen2ForCausalLM.load_weights = swapped


def _touch_device_0() -> None:
    import torch
    from megatron.core import parallel_state

    _wrap(parallel_state, "initialize_model_parallel", lambda **unused: torch.cuda.Stream(device=0))


def _allocate() -> None:
    import torch
    from megatron.core import parallel_state

    _wrap(parallel_state, "initialize_model_parallel", lambda **unused: torch.empty(16, device="cuda:3"))


def _read_from_the_gpu() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    _wrap(UnquantizedLinearMethod, "process_weights_after_loading", lambda self, layer: layer.weight.sum().item())


def _process_twice() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def add_one(self: Any, layer: Any) -> None:
        if getattr(layer, "was_processed", False):
            layer.weight.data += 1
        layer.was_processed = True

    _wrap(UnquantizedLinearMethod, "process_weights_after_loading", add_one)


def _keep_a_copy() -> None:
    """Something keeps the kernel of experts that the first loading made, and this a copy of a scale."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod

    kept = []
    make = Fp8MoEMethod._init_moe_kernel

    def make_and_keep(self: Any, layer: Any) -> None:
        make(self, layer)
        self.moe_kernel.own_scale = layer.w13_weight_scale_inv.data.clone()
        kept.append(self.moe_kernel)

    Fp8MoEMethod._init_moe_kernel = make_and_keep


def _derive_once() -> None:
    """A kernel derives a tensor of the first weights that it loads, and not of later ones."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    def derive(self: Any, layer: Any) -> None:
        if not hasattr(self, "derived"):
            self.derived = layer.weight.data.sum(1)

    _wrap(UnquantizedLinearMethod, "process_weights_after_loading", derive)


def _trust_the_note() -> None:
    """Finalizing leaves vLLM's note that it has processed a layer."""
    from hybrid3d.rollout import finalize

    finalize._forget_processing = lambda module: None


def _lose_a_mark(stages: Any) -> None:
    for name, parameter in stages[0].named_parameters():
        if name.endswith("self_attention.linear_proj.weight"):
            parameter.tensor_model_parallel = False


FAULTS = {
    "renamed": Fault(
        "names", "a private function of vLLM has another name", "restore_layer_refs", _rename_private_function
    ),
    "demand": Fault(
        "demand", "vLLM's CUDA build reads keys where its CPU build reads values", "qwen2", _swap_keys_and_values
    ),
    "context": Fault("contexts", "asking Megatron makes a stream on GPU 0", "context on GPU 0", _touch_device_0),
    "allocation": Fault("contexts", "asking Megatron allocates on the rank's GPU", "64 bytes on GPU 3", _allocate),
    "wait": Fault(
        "finalization",
        "finalizing reads a number from the GPU",
        r"Tensor\.item",
        _read_from_the_gpu,
    ),
    "stale": Fault("finalization", "finalizing twice is not finalizing once", "differs from vLLM", _process_twice),
    "derived": Fault(
        "finalization",
        "a kernel keeps what it derived from the first weights",
        r"derived: differs from vLLM",
        _derive_once,
    ),
    "kernel": Fault(
        "finalization",
        "a kernel of experts that was replaced lives on with its own copy of scales",
        "own_scale: a replaced kernel keeps it",
        _keep_a_copy,
        "b200-fp8",
        "qwen3_moe",
    ),
    "unprocessed": Fault(
        "finalization",
        "vLLM does not process experts in MXFP8 a second time",
        r"_w1\.scale: differs from vLLM",
        _trust_the_note,
        "b200-mxfp8",
        "qwen3_moe",
    ),
    "mark": Fault("attributes", "an output projection is not marked as sharded", "o_proj.*not sharded", _lose_a_mark),
}

"""The parts of the CUDA audit that run without its environment: what they find in made-up answers, code and tensors."""

from __future__ import annotations

import pytest
import torch

from audit import fake_gpus, fake_kernels, host_waits, names, page, pypi, state
from audit.__main__ import CHECKS
from audit.faults import FAULTS


def test_difference_is_said() -> None:
    assert page.difference({"pieces": ["a"], "kv": 1}, {"pieces": ["a"], "kv": 1}) == ""
    assert page.difference({"pieces": ["a", "b"]}, {"pieces": ["a", "c"]}) == "pieces: b; lacks c"
    assert page.difference([], ["a", "b", "c"]) == "lacks a; lacks b; 3 in all"
    assert page.difference(["b", "a"], ["a", "b"]) == "another order"
    assert page.difference("absent", "(layer)") == "absent, expected (layer)"


def test_names_that_are_used_are_found() -> None:
    source = (
        "import megatron.core.optimizer as o, os, torch\n"
        "from vllm.config import VllmConfig as V\n"
        "from .vllm import x\n"
        "def f(m):\n    from torch._ops import OpOverload\n    o.Adam(os._exit, V.a.b, torch.cuda.synchronize, m._c)"
    )
    used = {"megatron.core.optimizer", "megatron.core.optimizer.Adam", "vllm.config.VllmConfig"}
    assert set(names.used(source)) == {
        *used,
        "vllm.config.VllmConfig.a",
        "vllm.config.VllmConfig.a.b",
        "torch._ops.OpOverload",
    }


def test_private_attributes_of_others_are_found() -> None:
    files = ["class A:\n    def _f(self): self._g = self._h", "from vllm import x\nx._i; y._f; z._h"]
    assert names.private_attributes(files) == {"_h"}


def test_signature_has_names_kinds_and_defaults() -> None:
    assert names.describe("audit.names.describe", cuda=True) == "(name, cuda)"
    assert names.describe("audit.page.difference", cuda=True) == "(found, expected)"
    assert names.describe("audit.names.no_such_name", cuda=True) == "absent"
    assert names.describe("audit.names.ENGINES", cuda=True) == "tuple"
    assert names.describe("audit.fake_gpus.FakeGpus.contexts", cuda=True) == "str"  # set by its methods


def test_fake_gpus_count_contexts_and_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(torch.cuda).copy():  # `install` replaces some
        monkeypatch.setattr(torch.cuda, name, getattr(torch.cuda, name))
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        monkeypatch.setattr(torch.cuda.random, name, getattr(torch.cuda.random, name))
    with fake_gpus.installed() as gpus:
        torch.cuda.set_device(2)
        assert dict(gpus.contexts) == {2: 1}
        torch.cuda.Stream(device=1)
        torch.empty(0, device=torch.device("cuda", 5))
        torch.empty(3, device="meta")
        assert dict(gpus.contexts) == {2: 1, 1: 1}
        assert dict(gpus.nbytes) == {}
        gpus.forget(current=3)
        made = torch.zeros(4, device=torch.device("cuda", 6))
        torch.ones(2).to("cuda")
        torch.ones(2, dtype=torch.float64).cuda()
    assert made.device.type == "cpu"
    assert dict(gpus.nbytes) == {6: 16, 3: 8 + 16}
    assert gpus.contexts.keys() == {6, 3}


class Kernel:
    """Stands for a kernel of vLLM that keeps a scale."""

    __module__ = "vllm.made_up"

    def __init__(self, scale: torch.Tensor):
        self.scale = scale


def test_state_of_kernels_is_found_and_overwritten_but_buffers() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.register_buffer("positions", torch.arange(3))
    layer.kernel = Kernel(torch.ones(1))
    model = torch.nn.Sequential(layer)
    assert state.tensors_of(model).keys() == {"0.weight", "0.positions", "0.kernel.scale"}
    state.overwrite(model)
    assert layer.weight.isnan().all()
    assert layer.kernel.scale.isnan().all()
    assert layer.positions.tolist() == [0, 1, 2]


def test_replaced_kernel_that_keeps_its_own_memory_is_found() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    model = torch.nn.Sequential(layer)
    copies, views = Kernel(torch.ones(1)), Kernel(layer.weight.data[0])
    for old in (copies, views):
        layer.kernel = old
        before = state.kernels_of(model)
        layer.kernel = Kernel(layer.weight.data)
        found = [f"{one.path}.{one.name}" for one in state.stale_copies(before, model)]
        assert found == (["0.kernel.scale"] if old is copies else [])
    layer.kernel = Kernel(torch.ones(1))
    before = state.kernels_of(model)
    layer.kernel = views
    assert [*state.stale_copies(before, model)] == [], "nobody keeps it"


def test_scales_are_laid_out_as_deep_gemm_reads_them() -> None:
    """On Blackwell four exponents in an integer, the rows of a column beside each other, each as its block's scale."""
    scales = torch.pow(2.0, torch.arange(-5, 5).float()).view(1, 2, 5)
    assert fake_kernels.required_layout(scales, 200, 128, (9, 0)) is scales
    packed = fake_kernels.required_layout(scales, 200, 128, (10, 0))
    assert (packed.shape, packed.stride(-2), packed.dtype) == ((1, 200, 2), 1, torch.int32)
    exponents = packed.contiguous().view(torch.uint8).view(200, 8)
    assert exponents[0].tolist() == exponents[127].tolist() == [122, 123, 124, 125, 126, 0, 0, 0]
    assert exponents[128].tolist() == exponents[199].tolist() == [127, 128, 129, 130, 131, 0, 0, 0]


def test_host_waits_are_seen() -> None:
    with host_waits.HostWaits() as waits:
        torch.tensor(1.0)
        torch.empty(2, device=host_waits.GPU).fill_(1)
        assert waits.calls == []
        with host_waits.GPU:
            torch.tensor(1.0)
        torch.ones(1).item()
    assert waits.calls == ["torch.tensor", "torch.Tensor.item"]


def test_audit_checks_each_have_a_fault_they_must_find() -> None:
    assert {check.module for check in CHECKS} == {fault.check for fault in FAULTS.values()}


def test_pip_is_given_pypi_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*pypi.ADDS_PACKAGES, "PIP_CERT"):
        monkeypatch.setenv(name, "x")
    kept = pypi.environment()
    assert [name for name in kept if name in pypi.ADDS_PACKAGES] == []
    assert kept["PIP_CERT"] == "x"

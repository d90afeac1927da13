"""Megatron queried as on a machine with eight GPUs: nothing is made on any of them.

The functions of `torch.cuda` that Megatron calls are replaced in a process of its own, and what would make a CUDA
context is counted. Every other use of a GPU raises, as torch is built without CUDA.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from run_ranks import environment

pytestmark = pytest.mark.engines

QUERY = """
import json, sys
import torch

made = []
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda.current_device = lambda: torch.device("cuda", 0)  # torch without CUDA makes no device of a number
torch.cuda.get_device_capability = lambda *device: (9, 0)
torch.cuda.get_rng_state = lambda device=None: torch.get_rng_state()
torch.cuda.manual_seed = lambda seed: None


class Stream:
    def __init__(self, *args, **kwargs):
        made.append("stream")


torch.cuda.Stream = Stream

from megatron.core.tensor_parallel import random
random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: None

from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from hybrid3d.config import Lora, Train
from hybrid3d.inputs.models import read_config
from hybrid3d.train.megatron import runtime
from hybrid3d.train.megatron.probe import adapter_holdings_of, expected_shapes, holdings_of

assert runtime.ON_CUDA
for folder in sys.argv[1:]:
    config = read_config(folder)
    shapes, layout = expected_shapes(config), Train(tp=2, pp=2, dp=2, ep=2)
    held = holdings_of(config, layout, 5, torch.bfloat16)
    adapters = adapter_holdings_of(config, layout, 5, torch.bfloat16, Lora(rank=4, alpha=8), shapes)
    enough = len(held.pieces) > 10 and len(adapters.pieces) > 10
    print(json.dumps([enough, made, MoEAlltoAllTokenDispatcher.cuda_dtoh_stream is None]))
"""


def test_asking_megatron_makes_no_context(tiny_checkpoint: Callable[..., Path]) -> None:
    """The ranks ask before they are bound to their GPU: each would keep a context, and Megatron a stream, on GPU 0."""
    folders = [str(tiny_checkpoint(family)) for family in ("qwen3_moe", "deepseek_v3")]
    done = subprocess.run(
        [sys.executable, "-c", QUERY, *folders], env=environment("-"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()[-2:]] == [[True, [], True]] * 2

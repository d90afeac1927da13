"""FP8: a checkpoint with block scales is read into the GPU, and FP8 tensors travel bit for bit."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from gpu import one_rank
from gpu.record import Record
from gpu.transport import self_transport
from hybrid3d.reshard.files import load_files
from hybrid3d.reshard.move.device import synchronize
from hybrid3d.reshard.move.transport import as_bytes
from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.layout import Demand, Piece, View

BLOCK = 128
SHAPE = 384, 640
LARGEST = 448.0  # of float8_e4m3fn
NAME = "model.layers.0.self_attn.o_proj.weight"


def fp8(record: Record, device: str) -> None:
    """Read an FP8 checkpoint into memory on the device, and send an FP8 tensor."""
    torch.manual_seed(1)
    weight = torch.randn(SHAPE)
    blocks = weight.view(SHAPE[0] // BLOCK, BLOCK, SHAPE[1] // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / LARGEST
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    stored = (weight / spread).to(torch.float8_e4m3fn)
    expected = (stored.float() * spread).bfloat16()
    target = torch.zeros(SHAPE, dtype=torch.bfloat16, device=device)
    piece = Piece(NAME, Box.full(SHAPE), View("target", 0, (SHAPE[1], 1)), "bfloat16")
    with tempfile.TemporaryDirectory() as path:
        folder = Path(path)
        save_file({NAME: stored, f"{NAME}_scale_inv": scales}, folder / "model.safetensors")
        quantization = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}), encoding="utf-8")
        load_files(str(folder), Demand((piece,)), {"target": target}, 0)
    assert not one_rank.bits_differ(target.cpu(), expected), "the dequantized weights have other bits"
    record(read_elements=target.numel(), rounding_error=float((expected.float() - weight).abs().max()))
    transport = self_transport(one_rank.start())
    source = stored.to(device)
    arrived = torch.zeros_like(source)
    transport.submit_recv(as_bytes(arrived), 0, 0)
    transport.submit_send(as_bytes(source), 0, 0)
    transport.run().wait()
    synchronize()
    assert not one_rank.bits_differ(arrived, source), "an FP8 tensor arrived with other bits"
    record(sent_bytes=transport.received_bytes)

"""Replication of one layer's pieces for all layers of the same kind."""

from __future__ import annotations

from hybrid3d.reshard.plan.box import Box
from hybrid3d.reshard.plan.classes import layer_of, replicate_layer
from hybrid3d.reshard.plan.layout import Piece, View


def piece(name: str, local: str, start: int = 0, size: int = 4) -> Piece:
    return Piece(name, Box((start,), (size,)), View(local, start, (1,)), "float32")


def test_layer_is_found_in_canonical_and_local_names() -> None:
    assert layer_of("model.layers.12.mlp.experts.3.up_proj.weight") == 12
    assert layer_of("stage1.decoder.layers.0.mlp.linear_fc1.weight") == 0
    assert layer_of("model.embed_tokens.weight") is None
    assert layer_of("model.players.3.weight") is None


def test_layer_s_pieces_are_another_s_under_its_name() -> None:
    one = piece("model.layers.1.a.layers.1.b", "model.layers.1.a.layers.1.b", 2)
    (other,) = replicate_layer([one], 1, 13)
    assert other == piece("model.layers.13.a.layers.1.b", "model.layers.13.a.layers.1.b", 2)
    (other,) = replicate_layer([one], 1, 13, ("model.layers.1.", "stage2.layers.0."))
    assert other == piece("model.layers.13.a.layers.1.b", "stage2.layers.0.a.layers.1.b", 2)

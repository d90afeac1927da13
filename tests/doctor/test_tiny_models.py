"""The checkpoints of `certify` and of the checks of GPUs, and what the latter compare with."""

from __future__ import annotations

import pytest

from gpu.comparisons import TOLERANCE, compare, in_both
from gpu.models import CONFIGS
from hybrid3d.certify.tiny_models import _values, split_mix

pytestmark = pytest.mark.engines


def test_latent_attention_has_the_head_sizes_of_deepseek() -> None:
    """Others have no prefill backend on Hopper."""
    sizes = [CONFIGS["latent"][key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")]
    assert sizes == [128, 64, 128, 512]


def test_weights_are_the_same_everywhere() -> None:
    """They are computed with integers, by a published generator, of which these are the first numbers for seed 0."""
    assert [hex(x) for x in split_mix(0, 3)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]
    matrix, norm = _values("lm_head.weight", (64, 64), 0), _values("model.norm.weight", (64,), 0)
    assert not matrix.equal(_values("lm_head.weight", (64, 64), 1))
    assert not norm.equal(_values("model.layers.0.input_layernorm.weight", (64,), 0))
    assert matrix.abs().max() <= 0.1
    assert (norm - 1).abs().max() <= 0.1
    assert matrix.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.02)


def test_numbers_are_compared_within_a_tolerance_for_each_dtype() -> None:
    stored = {"loss": [2.0, 1.0], "grad_norm": [5.0, 4.0]}
    near = {"loss": [2.0001, 1.0], "grad_norm": [5.004, 4.0]}
    compare(near, stored, TOLERANCE["float32"], "case")
    compare({"loss": [2.03, 1.0], "grad_norm": [5.2, 4.0]}, stored, TOLERANCE["bfloat16"], "case")
    with pytest.raises(AssertionError, match=r"case: loss of step 1 is 1\.01, on a CPU 1: they differ by 1\.0e-02"):
        compare(stored | {"loss": [2.0, 1.01]}, stored, TOLERANCE["float32"], "case")
    with pytest.raises(AssertionError, match="grad_norm of step 0 is nan"):
        compare(stored | {"grad_norm": [float("nan"), 4.0]}, stored, TOLERANCE["bfloat16"], "case")


def test_time_that_is_in_both_of_two_sets_of_intervals() -> None:
    assert in_both([(0.0, 2.0), (3.0, 5.0)], [(1.0, 4.0), (9.0, 10.0)]) == 2.0
    assert in_both([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0

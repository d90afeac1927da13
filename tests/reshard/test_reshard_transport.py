"""`as_bytes` returns the tensor's own bytes, or raises."""

import pytest
import torch

from hybrid3d.reshard.move.transport import as_bytes


@pytest.mark.parametrize("tensor", [torch.zeros(2, 3).t(), torch.zeros(4, 3)[:, :2]], ids=["transposed", "gaps"])
def test_noncontiguous_tensor_is_refused_by_as_bytes(tensor: torch.Tensor) -> None:
    """The consecutive bytes would be those of other elements, and sending them would corrupt weights silently."""
    with pytest.raises(RuntimeError, match="view"):
        as_bytes(tensor)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (4, 6), (2, 1, 3)])
def test_bytes_are_the_tensor_s_own_memory(shape: tuple[int, ...], dtype: str) -> None:
    tensor = torch.zeros(3, *shape, dtype=getattr(torch, dtype))[1]
    flat = as_bytes(tensor)
    assert (flat.dtype, flat.shape, flat.stride()) == (torch.uint8, (tensor.numel() * tensor.itemsize,), (1,))
    assert flat.data_ptr() == tensor.data_ptr()


def test_lone_element_may_have_any_strides() -> None:
    tensor = torch.arange(8.0)[2:].as_strided((1, 1), (5, 7))
    assert as_bytes(tensor).view(torch.float32).tolist() == [2.0]

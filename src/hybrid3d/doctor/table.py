"""The checks of `hybrid3d doctor --gpu`, in their order: what each needs, and how long it may take."""

from __future__ import annotations

from hybrid3d.doctor.check import Check

CHECKS = "hybrid3d.doctor.checks."

GPU_CHECKS = (
    Check("versions", "versions that can work together", CHECKS + "versions:versions", 60),
    Check("cudnn", "a convolution and attention through cuDNN", CHECKS + "versions:cudnn", 60),
)

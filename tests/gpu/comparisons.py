"""What checks of GPUs compare: numbers with those of a CPU, and intervals of time with each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Interval = tuple[float, float]
"""Start and end in milliseconds."""

# Of losses and of gradient norms, relative. On a CPU, packing changes them by 3e-6 in float32 and 3e-3 in bfloat16;
# bfloat16 differs from float32 by 1e-2 and 2e-2.
TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (2e-2, 5e-2)}


def in_both(some: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Return the length of the time that is in an interval of both."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def compare(
    found: Mapping[str, list[float]], stored: Mapping[str, list[float]], limits: tuple[float, float], case: str
) -> None:
    for (name, values), limit in zip(found.items(), limits, strict=True):
        for step, (value, expected) in enumerate(zip(values, stored[name], strict=True)):
            error = abs(value - expected) / abs(expected)
            said = f"{case}: {name} of step {step} is {value:.6g}, on a CPU {expected:.6g}: they differ by {error:.1e}"
            assert error <= limit, f"{said}, expected at most {limit:.0e}"  # which NaN is not

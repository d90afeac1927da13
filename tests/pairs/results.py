"""What was proven of pairs: their certificates, and the page that lists them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from hybrid3d.engines.certificates import Certificate, certificates, vector_instructions
from pairs.proof import LAYOUTS, PROVEN, families, names_of_proofs
from pairs.table import Pair

PAGE = """\
# Engines, and the pairs of them that are proven

hybrid3d is written for ranges of its engines (`pyproject.toml`). Each row was run by `make engines` on CPUs:

- `certify` of {families}, each in the layouts {layouts};
- {others}.

Certificates of them are in the package: `hybrid3d doctor` and `hybrid3d train` compare what is installed with these.
A release that is not here yet is proven by one line in `tests/pairs/table.py` and `make engines`, about an hour.

{rows}
"""
HEAD = ("Python", "Megatron-Core", "vLLM", "torch", "transformers", "result", "minutes", "date", "CPU")


def certify(pair: Pair, folder: Path) -> Certificate:
    """Write the certificate of a pair from what its proofs have found."""
    lines = map(json.loads, (folder / "proofs.jsonl").read_text(encoding="utf-8").splitlines())
    found = {line["name"]: line for line in lines}  # the last of each name
    about = json.loads((folder / PROVEN).read_text(encoding="utf-8"))
    if about["versions"] != pair.versions:
        sys.exit(f"{about['versions']} was run in place of {pair.versions}: remove build/engines and run this again")
    certificate = Certificate(
        versions=pair.versions,
        proofs={name: line["wrong"] for name, line in found.items()},
        missing=tuple(name for name in names_of_proofs() if name not in found),
        touched=about["touched"],
        machine=vector_instructions(),
        minutes=round(sum(line["seconds"] for line in found.values()) / 60, 1),
        date=datetime.now(UTC).date().isoformat(),
    )
    certificate.write()
    return certificate


def write_page(pairs: Iterable[Pair], page: Path) -> None:
    """Write docs/engines.md from the certificates of these pairs."""
    rows = ["| " + " | ".join(HEAD) + " |", "|---" * len(HEAD) + "|", *_rows(pairs)]
    others = "; ".join(name for name in names_of_proofs() if not name.startswith("certify "))
    of_families = ", ".join(family for family, _, _ in families())
    layouts = " and ".join(f"`{layout}`" for layout in LAYOUTS)
    text = PAGE.format(families=of_families, layouts=layouts, others=others, rows="\n".join(rows))
    page.write_text(text, encoding="utf-8")


def _rows(pairs: Iterable[Pair]) -> Iterator[str]:
    known = {tuple(certificate.versions.values()): certificate for certificate in certificates()}
    for pair in pairs:
        found = known.get(tuple(pair.versions.values()))
        after = ("not run", "", "", "") if found is None else _result(found)
        yield "| " + " | ".join((*pair.versions.values(), *after)) + " |"


def _result(found: Certificate) -> tuple[str, str, str, str]:
    proven = sum(not wrong for wrong in found.proofs.values())
    text = f"{found.status}, {proven} proofs" if found.status == "certified" else f"{found.status}: {found.reason}"
    return text.replace("|", "/"), f"{found.minutes}", found.date, found.machine

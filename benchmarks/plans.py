"""Print the plans of all large recipes as the tables of docs/plans.md: `python benchmarks/plans.py > docs/plans.md`."""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


PAGE = """# What the recipes' syncs move

Printed by `python benchmarks/plans.py` ({today}, no GPU: everything is computed with the engines' own code). Bytes are
exact; seconds are predicted for the recipe's machine (`planning/estimates.py`), not measured.

## Bytes, seconds, memory

GB per rank that generates that are wanted, that are received, that of these cross the network (ranks of a node receive
together, once, what several of them want), and that would be received if every tensor were gathered on every rank
(broadcasts over pipeline stages, all-gathers over TP and EP). Memory is the maximum over GPUs in GB, of the 85 GB that
an H100 or A100 of 80 GiB has. It includes a reserve of 3 to 6 GB for contexts, NCCL's communicators and vLLM's CUDA
graphs, parts of which are assumed (`planning/hardware.py`); the recipes leave 4 % free. Of 512 + 256 GPUs the first
train and the others generate.

{bytes}

## Placement

Bytes of a sync over all ranks in GB, with consecutive ranks and with placement: received, and those of them that no
rank of the receiver's node holds (far). Placement gains nothing if both layouts shard equally, or if a rank receives
equally much in every slot. TP groups that stride over larger train groups receive the least (arXiv 2409.19256), and
experts gain if both layouts distribute them differently.

{placement}

## Changed elements

A sync of 0.5 % of the elements (`--changed 0.005`), with what `plan` counts of the busiest rank: launches, waits of the
host and bytes that finding, encoding, decoding and writing them takes. A launch is taken for 5 us and a wait for 20 us,
encoding for half of the memory's bandwidth (`planning/sync_choice.py`); these are assumed. A sync of all elements
overlaps the optimizer's step, unless ranks generate ahead of it: exposed is what remains.

{changed}"""

CHANGED = "0.005"  # of the elements


def plan(recipe: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "hybrid3d", "plan", str(recipe), "--json", "--changed", CHANGED]
    done = subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, encoding="utf-8", errors="replace"
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def bytes_row(p: dict[str, Any]) -> dict[str, str]:
    ranks, generating = p["ranks"], p["generation_ranks"]
    return {
        "recipe": p["name"],
        "GPUs": str(ranks) if ranks == generating else f"{ranks - generating} + {generating}",
        "wanted": gb(p["per_rank"]["wanted_bytes"]["max"]),
        "received": gb(p["received_bytes"] / generating),
        "network": gb(p["network_bytes"] / generating),
        "gathered": gb(p["per_rank"]["gather_bytes"]["mean"]),
        "sync, s": f"{p['seconds']['sync']:.3f}",
        "bottleneck": p["seconds"]["bottleneck"],
        "gather, s": f"{p['seconds']['gather']:.3f}",
        "train": gb(p["memory"]["train"]),
        "generate": gb(p["memory"]["generate"]),
    }


def placement_row(p: dict[str, Any]) -> dict[str, str]:
    chosen, consecutive = p["placement"], p["placement"]["consecutive"]
    fewer = (consecutive["received_bytes"] - chosen["received_bytes"]) / max(1, consecutive["received_bytes"])
    return {
        "recipe": p["name"],
        "received, consecutive": gb(consecutive["received_bytes"]),
        "received, placed": gb(chosen["received_bytes"]),
        "far, consecutive": gb(consecutive["far_bytes"]),
        "far, placed": gb(chosen["far_bytes"]),
        "fewer received, %": f"{100 * fewer:.1f}",
    }


def changed_row(p: dict[str, Any]) -> dict[str, str]:
    seconds = p["seconds"]
    return {
        "recipe": p["name"],
        "received, changed": gb(p["delta_bytes"] / p["generation_ranks"]),
        "received, all": gb(p["received_bytes"] / p["generation_ranks"]),
        "launches": f"{p['max_delta_launches']:,}",
        "waits": f"{p['max_delta_host_waits']:,}",
        "read and written": gb(p["max_delta_touched_bytes"]),
        "messages, s": f"{seconds['delta_wire']:.3f}",
        "encoding, s": f"{seconds['delta_encoding']:.3f}",
        "changed, s": f"{seconds['delta']:.3f}",
        "all, s": f"{seconds['sync']:.3f}",
        "all, exposed, s": f"{seconds['sync_exposed']:.3f}",
        "auto sends": "changed" if p["delta_chosen"] else "all",
    }


def gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.1f}"


def table(rows: list[dict[str, str]]) -> str:
    lines = [list(rows[0]), ["---", *["---:"] * (len(rows[0]) - 1)], *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    recipes = [
        path for path in sorted((ROOT / "recipes").glob("*.yaml")) if "models/" in path.read_text(encoding="utf-8")
    ]
    plans = [plan(path) for path in recipes]
    today = datetime.datetime.now(datetime.UTC).date()
    print(
        PAGE.format(
            today=today,
            bytes=table([bytes_row(p) for p in plans]),
            placement=table([placement_row(p) for p in plans if p["ranks"] == p["generation_ranks"]]),
            changed=table([changed_row(p) for p in plans]),
        )
    )


if __name__ == "__main__":
    main()

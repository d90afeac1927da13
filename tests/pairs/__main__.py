"""Prove pairs of engines on this machine's CPU: PYTHONPATH=src:tests python -m pairs, which `make engines` does.

Makes an environment for each pair (several GB of downloads, once), proves it in processes of that environment, writes a
certificate of each pair that was run, and docs/engines.md. What has been proven is not repeated unless FOLDER is
removed. The exit code is 0 if all pairs that were chosen are certified.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from pairs import environment, results
from pairs.table import FLOOR, PAIRS

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="pairs", description=__doc__.partition(":")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build/engines", help="for environments and results")
    parser.add_argument("--only", default="", metavar="TEXT", help="only the pairs whose name contains this")
    parser.add_argument("--list", action="store_true", help="list the names of the pairs and end")
    options = parser.parse_args()
    chosen = [pair for pair in PAIRS if options.only in pair.name]
    if options.list:
        print("\n".join(pair.name for pair in PAIRS))
        return 0
    if not chosen:
        sys.exit(f"--only {options.only}: no pair's name contains it: see --list")
    options.folder.mkdir(parents=True, exist_ok=True)
    floor = options.folder / "proofs" / FLOOR.name
    if FLOOR not in chosen and not (floor / "proofs.jsonl").exists():
        chosen = [FLOOR, *chosen]
    found = []
    for number, pair in enumerate(chosen, 1):
        print(f"[{number}/{len(chosen)}] {pair.name}", flush=True)
        python = environment.make(pair, options.folder)
        folder = options.folder / "proofs" / pair.name
        variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}", "HF_HUB_OFFLINE": "1"}
        command = [str(python), "-m", "pairs.proof", str(folder), str(floor)]
        subprocess.run(command, cwd=ROOT, env=variables, check=True)  # which limits each of its commands
        found.append(results.certify(pair, folder))
    results.write_page(PAIRS, ROOT / "docs/engines.md")
    return 0 if all(certificate.status == "certified" for certificate in found) else 1


if __name__ == "__main__":
    sys.exit(main())

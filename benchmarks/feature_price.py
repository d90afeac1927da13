"""Print what features have cost in files and lines of the package, from their commits, beside what toys cost.

    python benchmarks/feature_price.py COMMIT...

A toy (`tests/toys/`) is a new kind of an interface in one file.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/hybrid3d/"


def git(*arguments: str) -> list[str]:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, encoding="utf-8")
    return [line for line in done.stdout.splitlines() if line]


def price(commit: str) -> str:
    """Return a row: files and packages that a commit has touched, its lines more and less, and its subject."""
    (subject,) = git("show", "--no-patch", "--format=%h %s", commit)
    rows = git("show", "--numstat", "--no-renames", "--format=", commit, "--", PACKAGE)
    changes = [row.split("\t") for row in rows]
    names = [name.removeprefix(PACKAGE) for _, _, name in changes if name.endswith(".py")]
    packages = {name.partition("/")[0] for name in names}
    more, less = (sum(int(row[i]) for row in changes if row[2].endswith(".py")) for i in range(2))
    return f"{len(names):5} {len(packages):8} {more:+6} {-less:+6}  {subject}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+", metavar="COMMIT")
    print("files packages  lines          what")
    for commit in parser.parse_args().commits:
        print(price(commit))
    for toy in sorted((ROOT / "tests/toys").glob("*.py")):
        print(f"{1:5} {0:8} {len(toy.read_text(encoding='utf-8').splitlines()):+6} {0:+6}  tests/toys/{toy.name}")


if __name__ == "__main__":
    main()

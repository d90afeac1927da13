"""What README.md and the pages of docs/ name exists: paths, links, make targets, hybrid3d commands, their options."""

import re
import shlex
import subprocess
import sys
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "hybrid3d"
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_HERE = {  # what a page names and a clone lacks: groups of metrics, folders of a run or a user, files that are made
    "algorithms.md": {"critic/", "mismatch/"},
    "gpu.md": {"benchmarks/results/gpu-check.json", "vllm/device_allocator/*.py"},
    "launch.md": {"data/", "mismatch/"},
    "run-folder.md": {"critic/", "mismatch/", "time/", "record/step-000010/", "tensorboard/", "wandb/"},
    "tracking.md": {"tensorboard/", "wandb/"},
}

# A name below one of these is ours
FOLDERS = ("src", "tests", "recipes", "examples", "launch", "benchmarks", "requirements", "docs", ".ci")
SOURCES = (".py", ".md", ".sh", ".toml", ".txt")  # a name that ends so is a file of ours, wherever it lies
FIGURES = (".yaml", ".yml", ".png", ".svg")  # so is this, unless it is bare: a run writes recipe.yaml and curves.png
BARE = ("Makefile", "Dockerfile", "LICENSE")
MADE = ("build", "runs", ".venv", "checkpoints", "logs")  # comes of running things, so a fresh clone lacks it


def code(text: str) -> list[str]:
    """The lines of code in a Markdown text: fenced and indented blocks without comments and prompts, and `spans`."""
    fence = re.compile(r"^( *)(`{3,}|~{3,})[^\n]*\n(.*?)^ *\2 *$", re.DOTALL | re.MULTILINE)
    prose = fence.sub("\n", text)
    blocks = [match[3] for match in fence.finditer(text)] + re.findall(r"^(?: {4}|\t)(.*)$", prose, re.MULTILINE)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    stripped = [re.sub(r"(^|\s)#.*$", "", line).strip().removeprefix("$ ") for line in lines]
    return [line for line in stripped if line] + re.findall(r"(?<!`)`([^`\n]+)`(?!`)", prose)


def commands(text: str) -> list[list[str]]:
    """Each shell command in the code, in words, without the settings (VAR=x) before it."""
    found = []
    for line in code(text):
        for command in re.split(r"&&|\|\||[;|]", line):
            try:
                words = shlex.split(command)
            except ValueError:  # an unpaired quote: prose or Python, not a command
                continue
            while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", words[0]):
                del words[0]
            if words:
                found.append(words)
    return found


def make_targets(text: str) -> set[str]:
    calls = [words[1:] for words in commands(text) if words[0] == "make"]
    return {word for call in calls for word in call if re.fullmatch(r"[\w.-]+", word) and not word.startswith("-")}


def subcommands(text: str) -> dict[str, set[str]]:
    """Each subcommand of hybrid3d that is named, with every option given to it."""
    found: dict[str, set[str]] = {}
    for words in commands(text):  # the command may stand behind srun or torchrun
        at = next((i for i, word in enumerate(words[:-1]) if re.fullmatch(r"(\S*bin/)?hybrid3d", word)), None)
        if at is not None and re.fullmatch(r"[a-z][a-z-]*", words[at + 1]):
            given = takewhile(lambda word: word != "--", words[at + 2 :])  # what follows is another program's
            options = {word.strip("[]").partition("=")[0] for word in given if re.match(r"\[?--?[a-z]", word)}
            found.setdefault(words[at + 1], set()).update(options)
    return found


def is_ours(name: str) -> bool:
    """Whether a word of code means a path of this repository, rather than a model, a metric or a run's output."""
    top, slash, _ = name.partition("/")
    if not re.fullmatch(r"[\w.*/-]+", name) or top in (*MADE, ""):
        return False
    return (
        (bool(slash) and top in FOLDERS)
        or name.endswith((*SOURCES, "/"))
        or name in BARE
        or (bool(slash) and name.endswith(FIGURES))
    )


def paths(text: str) -> set[str]:
    """Paths of this repository in code, and relative targets of links. A word may end in ::test or :12."""
    words = [re.split(r":|$", part)[0] for line in code(text) for part in re.split(r"[\s=,()\[\]'\"]+", line)]
    links = [
        link for link in re.findall(r"\]\(([^)\s#]+)", text) if "://" not in link and not link.startswith("mailto:")
    ]
    return {word.removeprefix("./") for word in words if is_ours(word.removeprefix("./"))} | set(links)


def exists(name: str) -> bool:
    """A path may be given from the repository's root or from src/hybrid3d, with stars; a bare file from anywhere."""
    if any(next(base.glob(name.rstrip("/")), None) for base in (ROOT, PACKAGE)):
        return True
    return "/" not in name and any(next((ROOT / folder).rglob(name), None) for folder in FOLDERS)


@cache
def help_of(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the console script's entry point on `arguments --help`."""
    start = "import sys; from hybrid3d.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, *arguments, "--help"]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_readme_names_something_of_each_kind() -> None:
    text = README.read_text()
    assert paths(text), "README.md names no path"
    assert make_targets(text), "README.md names no make target"
    assert subcommands(text), "README.md names no hybrid3d command"
    assert help_of("no-such-command").returncode != 0  # so that success below means something


def test_readme_is_short_with_one_table_of_numbers_shown_elsewhere() -> None:
    text = README.read_text()
    assert len(text.split()) <= 650
    assert len(re.findall(r"^\|---", text, re.MULTILINE)) == 1
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    header, _, *rows = rows
    assert header == ["what", "number", "printed by", "hardware, date"]
    pages = [ROOT / "docs/demos.md", ROOT / "docs/plans.md", *sorted((ROOT / "benchmarks/results").glob("*.md"))]
    printed = set(re.findall(r"[\d,]*\d(?:\.\d+)?", " ".join(page.read_text() for page in pages)))
    for _, number, command, when in rows:
        assert set(re.findall(r"[\d,]*\d(?:\.\d+)?", number)) <= printed
        assert "`" in command or command == "the same"
        assert re.search(r"\d{4}-\d\d-\d\d$", when) or when == "the same"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    named = paths(page.read_text())
    missing = {name for name in named if not exists(name) and not (page.parent / name).exists()}
    assert sorted(missing - NOT_HERE.get(page.name, set())) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert make_targets(page.read_text()) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_subcommands_and_their_options_exist(page: Path) -> None:
    named = subcommands(page.read_text())
    failed = {name: help_of(name).stderr for name in named if help_of(name).returncode != 0}
    assert failed == {}
    known = {name: set(re.findall(r"--?[a-z][\w-]*", help_of(name).stdout)) for name in named}
    assert {name: options - known[name] for name, options in named.items() if options - known[name]} == {}


def test_pages_of_the_site_can_be_reached() -> None:
    """The first page of the site, which begins with the README, has each page in a table of contents."""
    listed = re.findall(r"^([\w-]+)$", (ROOT / "docs/index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.stem for page in (ROOT / "docs").glob("*.md") if page.stem != "index")


# Without local_copies, which imports both engines before it reads its arguments, and what others import
NO_SCRIPTS = ("copy_rates", "local_copies", "predicted_changes")
BENCHMARKS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem not in NO_SCRIPTS)


@pytest.mark.parametrize("script", BENCHMARKS, ids=lambda path: path.stem)
def test_benchmark_says_what_it_is_and_runs_nothing(script: Path) -> None:
    done = subprocess.run([sys.executable, script, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout


SAMPLE = """
Prose with a/b.py outside code, make nothing. See [the page](docs/page.md#top), [web](https://a.org/b.py).
Run `make setup` or `hybrid3d eval RUN --step 3`; weights of `Qwen/Qwen2.5-7B` go by `reshard/` and
`time/sync_seconds`; `hybrid3d` alone is no command, nor is `hybrid3d SUBCOMMAND`. Also `recipes/*.yaml`, `setup.py`.

```bash
$ make -j2 test lint PYTHON=python3.11   # make sure
cd x && PYTHONPATH=src .venv/bin/hybrid3d train recipes/demo.yaml \\
    run.steps=3 --dry-run
.venv/bin/pytest tests/house/test_house.py::test_file_names_have_no_utils
cat runs/demo/metrics.jsonl | head; srun -N2 hybrid3d plan R [--json]; hybrid3d serve R --port 1 -- --max-model-len 2
```

    make clean
"""


def test_sample_text_yields_make_targets_subcommands_and_paths() -> None:
    assert make_targets(SAMPLE) == {"setup", "test", "lint", "clean"}
    assert subcommands(SAMPLE) == {"eval": {"--step"}, "train": {"--dry-run"}, "plan": {"--json"}, "serve": {"--port"}}
    ours = {"reshard/", "recipes/*.yaml", "setup.py", "recipes/demo.yaml", "tests/house/test_house.py", "docs/page.md"}
    assert paths(SAMPLE) == ours


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("tests/house/test_readme.py", True),
        ("tests/*/test_*.py", True),
        ("reshard/", True),
        ("test_readme.py", True),
        ("Makefile", True),
        (".ci/run", True),
        ("tests/test_nothing_of_this_name.py", False),
        ("tests/no_such_*.py", False),
        ("no_such.py", False),
        ("resharding/", False),
    ],
)
def test_exists_tells_which_of_our_paths_are_there(name: str, there: bool) -> None:
    assert is_ours(name)
    assert exists(name) is there

"""Checks that `docs/recipe.md` lists every setting, is up to date, and marks what a first run needs."""

import importlib.util
from collections import Counter
from pathlib import Path

from hybrid3d.config import load_recipe, recipe_to_yaml
from hybrid3d.config.schema import flatten_settings
from hybrid3d.storage.user_files import parse_yaml

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("recipe_page", ROOT / "docs/recipe.py")
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)


def test_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/recipe.md").read_text() == made.page(), "run python docs/recipe.py"


def test_recipe_page_has_a_row_for_every_setting() -> None:
    recipe = load_recipe(
        ROOT / "recipes/demo-cpu.yaml",
        ["algorithm.name=ppo", "critic.optimizer.lr=0.1", "rollout.agents.port=9000", "lora.rank=8"],
    )
    wanted = {
        key
        for key in flatten_settings(parse_yaml(recipe_to_yaml(recipe)))
        if key not in ("name", "tracking", "schedule")
    }
    found, section = set(), ""
    for line in made.page().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `"):
            found.add(f"{section}.{line.split('`')[1]}")
    of_critic = {key for key in wanted if key.startswith("critic.optimizer.")}
    assert of_critic
    assert found == wanted - of_critic | {"critic.optimizer", "rollout.agents", "evaluation.data"}


def test_recipe_page_marks_what_a_first_run_needs() -> None:
    """The settings without a default, and those that half of the recipes set, and few others."""
    marked, required, section = set(), set(), ""
    for line in made.page().splitlines():
        section = line.removeprefix("## ") if line.startswith("## ") else section
        if line.startswith("| `"):
            name, _, default, *_ = (cell.strip() for cell in line.strip("|").split(" | "))
            key = f"{section}.{name.split('`')[1]}"
            marked |= {key} if name.endswith(made.MARK) else set()
            required |= {key} if not default else set()
    assert marked == {f"{section}.{name}" for section, names in made.FIRST_RUN.items() for name in names}
    assert required
    recipes = [parse_yaml(path.read_text()) for path in (ROOT / "recipes").glob("*.yaml")]
    counts = Counter(key for recipe in recipes for key in flatten_settings(recipe))
    usual = {key for key, count in counts.items() if 2 * count >= len(recipes)} - {"name"}
    assert required | usual <= marked
    assert len(marked) <= 35

"""Checks that `docs/recipe.md` lists every setting and is up to date."""

import importlib.util
from pathlib import Path

from hybrid3d.config import load_recipe, recipe_to_yaml
from hybrid3d.config.schema import flatten_settings
from hybrid3d.storage.user_files import parse_yaml

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("recipe_page", ROOT / "docs/recipe.py")
assert SPEC is not None
assert SPEC.loader is not None
made = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(made)


def test_the_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs/recipe.md").read_text() == made.page(), "run python docs/recipe.py"


def test_every_setting_has_its_row() -> None:
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

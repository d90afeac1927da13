"""Recipes: what a run is asked to do, and every mistake in it found before anything starts.

`load_recipe` checks what the file alone can tell, `check_layout` how the recipe fits a model. Standard library, yaml
and the tables in `families/` only, so that the command line answers fast.
"""

from hybrid3d.config.load import load_recipe, read_recipe, recipe_to_yaml
from hybrid3d.config.model_shape import ModelShape, check_layout, check_layout_early
from hybrid3d.config.recipe import Recipe
from hybrid3d.config.schema import RecipeError
from hybrid3d.config.sections.engines import OFFLOADS, Machine, Model, Rollout, Sync, Train
from hybrid3d.config.sections.learning import Algorithm, Correction, Critic, Data, Guard, Kl, Optimizer, Reward, Run

__all__ = [
    "OFFLOADS",
    "Algorithm",
    "Correction",
    "Critic",
    "Data",
    "Guard",
    "Kl",
    "Machine",
    "Model",
    "ModelShape",
    "Optimizer",
    "Recipe",
    "RecipeError",
    "Reward",
    "Rollout",
    "Run",
    "Sync",
    "Train",
    "check_layout",
    "check_layout_early",
    "load_recipe",
    "read_recipe",
    "recipe_to_yaml",
]

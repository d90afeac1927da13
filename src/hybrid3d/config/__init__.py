"""Recipes: the settings of a run, validated before anything starts.

`load_recipe` validates the file by itself, `check_layout` validates it against a model. This package imports only the
standard library, yaml and the tables in `families/`, so that the command line responds fast.
"""

from hybrid3d.config.layout_checks import check_layout, check_layout_early
from hybrid3d.config.layout_rules import sequences_multiple
from hybrid3d.config.load import load_recipe, read_recipe, recipe_from_yaml, recipe_to_ascii, recipe_to_yaml
from hybrid3d.config.model_shape import ModelShape
from hybrid3d.config.quantization_rules import FP8_ALIGNMENT
from hybrid3d.config.recipe import Recipe
from hybrid3d.config.schema import RecipeError
from hybrid3d.config.sections.algorithm import Algorithm
from hybrid3d.config.sections.engines import OFFLOADS, Agents, Async, Machine, Model, RoleRanks, Rollout, Sync, Train
from hybrid3d.config.sections.learning import Data, Lora, Optimizer, Reward, Run

__all__ = [
    "FP8_ALIGNMENT",
    "OFFLOADS",
    "Agents",
    "Algorithm",
    "Async",
    "Data",
    "Lora",
    "Machine",
    "Model",
    "ModelShape",
    "Optimizer",
    "Recipe",
    "RecipeError",
    "Reward",
    "RoleRanks",
    "Rollout",
    "Run",
    "Sync",
    "Train",
    "check_layout",
    "check_layout_early",
    "load_recipe",
    "read_recipe",
    "recipe_from_yaml",
    "recipe_to_ascii",
    "recipe_to_yaml",
    "sequences_multiple",
]

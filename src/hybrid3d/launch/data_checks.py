"""Checks of data files, rewards and environments that import neither torch nor an engine, so that they fail fast."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from hybrid3d.config import Recipe, RecipeError
from hybrid3d.scoring.environments import find_environment
from hybrid3d.scoring.functions import find_reward

MAX_EARLY_BYTES = 16 * 2**20  # of JSON Lines, which are parsed whole, about half a second; larger ones later


def check_data_early(recipe: Recipe) -> None:
    """Check that data files and their columns are there, and the form of the names of reward and environment.

    `check_run` checks the rows, and loads the functions.

    Raises:
        RecipeError, DataError: by the first that is wrong.
    """
    problems = list(_name_problems(recipe))
    if problems:
        raise RecipeError(recipe.name, problems)
    from hybrid3d.rl.data_files import JSON_LINES, check_columns  # pyarrow, half a second

    data = recipe.data
    columns = (data.prompt, data.chosen, data.rejected) if recipe.algorithm.uses_pairs else (data.prompt, data.answer)
    files = [(path, columns) for path in (data.train, data.eval)]
    files += [(path, (data.prompt, data.answer)) for path in recipe.evaluation.data.values()]
    for path, wanted in files:
        if Path(path).suffix == JSON_LINES and Path(path).is_file() and Path(path).stat().st_size > MAX_EARLY_BYTES:
            continue
        chats = [column for column in wanted if column == data.prompt or recipe.algorithm.uses_pairs]
        check_columns(path, wanted, chats if data.chat_template else ())


def _name_problems(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    names: list[tuple[str, Callable[[str], object], str]] = [("reward.name", find_reward, recipe.reward.name)]
    if rollout is not None and rollout.environment is not None:
        names.append(("rollout.environment", find_environment, rollout.environment))
    for key, find, name in names:
        try:
            find(name)
        except ValueError as error:
            yield f"{key}: {error}"

"""Tries a tokenizer's chat template, which is a program of the user's, in a process with bounds."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.rl.data import DataError, read_columns

ROWS = 4  # of each file, to try the template with
SECONDS = 10.0
MEMORY = 2**30  # bytes that the process may take beyond what it has at its start
CHARACTERS = 2**24  # that a template may make of one prompt


def check_chat_template(recipe: Recipe, tokenizer: Any) -> None:
    """Render the first prompts of the data, where a template may loop or allocate without end.

    What a template only raises is the row's matter: `PromptData.read` counts it.

    Raises:
        DataError: the tokenizer has none, or it takes too long, too much memory, or makes no text.
    """
    data = recipe.data
    if not tokenizer.chat_template:
        raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
    columns, chats = (data.prompt, data.answer), (data.prompt,)
    prompts = [row for path in (data.train, data.eval) for row in read_columns(path, columns, chats, first=ROWS)[0]]
    context = multiprocessing.get_context("fork")  # the tokenizer is there already, and rendering starts no threads
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(theirs, tokenizer, prompts), daemon=True)
    process.start()
    theirs.close()
    problem = f"no end within {SECONDS:g} s"
    try:
        if ours.poll(SECONDS):
            problem = ours.recv()
    except EOFError:
        process.join(SECONDS)
        problem = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        ours.close()
    if problem:
        where = f"{Path(recipe.model.path)}: the tokenizer's chat template"
        raise DataError(f"{where} cannot be used: {problem}: mend it, or set data.chat_template to false")


def _render(connection: Connection, tokenizer: Any, prompts: list[Any]) -> None:
    """Send what is wrong, or an empty text."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    problem = ""
    for prompt in prompts:
        try:
            problem = problem or _problem_of(tokenizer, prompt)
        except MemoryError:
            problem = f"it takes more than {MEMORY // 2**20} MiB of memory"
    connection.send(problem)


def _problem_of(tokenizer: Any, prompt: Any) -> str:
    if prompt is None:
        return ""
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    except MemoryError:
        raise
    except Exception:
        return ""  # of this prompt
    if not isinstance(text, str):
        return f"it makes {type(text).__name__}, not a text"
    return f"it makes {len(text):,} characters of one prompt" if len(text) > CHARACTERS else ""

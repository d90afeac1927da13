"""Tests a tokenizer's chat template, which is user code, in a process with limits on time and memory."""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from hybrid3d.config import Recipe
from hybrid3d.rl.chats import without_nulls
from hybrid3d.rl.data_files import DataError, read_columns

ROWS = 4  # of each file, with which the template is tested
SECONDS = 10.0
MEMORY = 2**30  # bytes that the process may allocate
CHARACTERS = 2**24  # that a template may return for one prompt


def check_chat_template(recipe: Recipe, tokenizer: Any) -> None:
    """Render the first prompts of the data, to find a template that loops or allocates without end.

    An error that the template raises is not reported here: `PromptData.read` counts the row as broken.

    Raises:
        DataError: the tokenizer has no template, or the template takes too long or too much memory, or returns no text.
    """
    data = recipe.data
    if not tokenizer.chat_template:
        raise DataError("data.chat_template=true, but the tokenizer has no chat template: set it to false")
    files = (data.train, data.eval, *recipe.evaluation.data.values())
    prompts = [row for path in files for row in read_columns(path, (data.prompt,), (data.prompt,), first=ROWS)[0]]
    context = multiprocessing.get_context("fork")  # inherits the loaded tokenizer; rendering starts no threads
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_render, args=(sender, tokenizer, prompts), daemon=True)
    process.start()
    sender.close()
    problem = f"it does not end within {SECONDS:g} s"
    try:
        if receiver.poll(SECONDS):
            problem = receiver.recv()
    except EOFError:
        process.join(SECONDS)
        problem = f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        receiver.close()
    if problem:
        where = f"{Path(recipe.model.path)}: the tokenizer's chat template"
        raise DataError(f"{where} cannot be used: {problem}: repair it, or set data.chat_template to false")


def _render(connection: Connection, tokenizer: Any, prompts: list[Any]) -> None:
    """Render the prompts under a memory limit, and send the first problem, or an empty text."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + MEMORY
    with contextlib.suppress(ValueError, OSError):  # a lower limit is already set
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
        text = tokenizer.apply_chat_template(without_nulls(turns), add_generation_prompt=True, tokenize=False)
    except MemoryError:
        raise
    except Exception:
        return ""  # `PromptData.read` reports the row
    if not isinstance(text, str):
        return f"it returns {type(text).__name__}, not a text"
    return f"it returns {len(text):,} characters for one prompt" if len(text) > CHARACTERS else ""

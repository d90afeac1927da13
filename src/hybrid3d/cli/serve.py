"""`hybrid3d serve`: answer requests of OpenAI clients with a run's checkpoint, by vLLM's own server."""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from hybrid3d import launch_environment
from hybrid3d.cli.starting import check_origin
from hybrid3d.cli.terminal import DONE, Commands, make_console, path_argument
from hybrid3d.config import Recipe, RecipeError, check_layout_early, load_recipe
from hybrid3d.config.schema import MAX_PORT
from hybrid3d.launch_environment import first_address, is_loopback
from hybrid3d.run.folder import RunFolder, find_checkpoint_step, served_folder


def add_parser(commands: Commands) -> None:
    parser = commands.add_parser("serve", help="answer requests of OpenAI clients with a run's checkpoint")
    parser.add_argument("folder", metavar="FOLDER", help="a run's folder, or a Hugging Face checkpoint")
    parser.add_argument("overrides", nargs="*", metavar="rollout.key=value", help="of a run: settings to change")
    parser.add_argument("--step", type=int, help="of a run: the checkpoint after this many updates (default: the last)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="the port to listen at (default: 8000)")
    parser.epilog = "what follows -- is passed to `vllm serve`, such as -- --max-model-len 4096"
    parser.set_defaults(run=_run, passed_on=[])


def _run(options: argparse.Namespace, arguments: list[str]) -> int:
    if launch_environment.under_launcher():
        raise RecipeError("serve", ["it starts all processes itself: call it without torchrun, once on the machine"])
    _check_address(options.host, options.port)
    checkpoint, name, recipe = _find_model(options)
    from hybrid3d.launch.server import SERVER_ENVIRONMENT, server_command

    command = [*server_command(checkpoint, name, options.host, options.port, recipe), *options.passed_on]
    console = make_console(stderr=True)
    console.print(f"serving {checkpoint} as {name} at http://{options.host}:{options.port}/v1", soft_wrap=True)
    if not is_loopback(options.host) and not os.environ.get("VLLM_API_KEY") and "--api-key" not in options.passed_on:
        text = f"warning: whoever reaches {options.host} is answered: set VLLM_API_KEY to a key that requests need"
        console.print(text, style="yellow", soft_wrap=True)
    sys.stdout.flush()
    os.execve(command[0], command, {**SERVER_ENVIRONMENT, **os.environ})


def _check_address(host: str, port: int) -> None:
    """Raise RecipeError if the address cannot be listened at, because loading a model takes minutes."""
    option = f"--host {host} --port {port}"
    if not 0 < port <= MAX_PORT:
        raise RecipeError(option, [f"a port is a number from 1 to {MAX_PORT}"])
    try:
        family, kind, protocol, _, address = first_address(host, port)
        with socket.socket(family, kind, protocol) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
    except OSError as error:
        problem = f"nothing can listen there ({error.strerror}): choose another port, or an address of this machine"
        raise RecipeError(option, [problem]) from None


def _find_model(options: argparse.Namespace) -> tuple[Path, str, Recipe | None]:
    """Return a Hugging Face checkpoint, its name, and for that of a run the recipe; a run's is exported first."""
    path, overrides = path_argument(options.folder, "FOLDER"), options.overrides
    folder = RunFolder(path)
    if folder.recipe.exists():
        folder.check()
        recipe = load_recipe(folder.recipe, overrides)
        if recipe.rollout is None:
            raise RecipeError(recipe.name, ["the run has no `rollout` section, which says how vLLM runs its model"])
        check_layout_early(recipe)
        from hybrid3d.inputs.checks import check_model

        check_model(recipe)
        step = find_checkpoint_step(folder, options.step)
        check_origin(folder, step)
        return _export(folder, step, recipe), recipe.name, recipe
    if not (path / "config.json").is_file():
        raise RecipeError(str(path), ["neither the folder of a run (no recipe.yaml) nor a checkpoint (no config.json)"])
    if overrides or options.step is not None:
        given = overrides[0] if overrides else f"--step {options.step}"
        raise RecipeError(given, [f"it applies to a run, and {path} is a checkpoint: set vLLM's own options after --"])
    return path, path.resolve().name, None


def _export(folder: RunFolder, step: int, recipe: Recipe) -> Path:
    """Return the Hugging Face checkpoint of a step in the run's folder, after exporting it if it is not there.

    It has the adapters of a run in the weights. It is found by the checkpoint's content, not by the step alone.
    """
    from hybrid3d.run.identity import derived_key

    key = derived_key(folder, step, recipe)
    out = served_folder(folder, step, key)
    if not out.exists():
        out.parent.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "hybrid3d", "export", str(folder.path), str(out), "--step", str(step)]
        command += ["--merged"] if recipe.lora is not None else []
        code = subprocess.call(command)
        if code != DONE:
            raise SystemExit(code)  # the command has said why
        if derived_key(folder, step, recipe) != key:
            shutil.rmtree(out)
            problem = f"the checkpoint of step {step} was written again while it was exported: call serve again"
            raise RecipeError(str(folder.path), [problem])
    return out

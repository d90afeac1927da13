"""Process groups of real runs: no rank is given up as it is late, and training's groups are used before vLLM starts.

A `sitecustomize` notes the groups of each rank, with their timeouts and the number of operations that each has had,
when vLLM starts and when the run ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commands import EXPERTS, ROOT, demo_folder, experts_folder, hybrid3d
from hybrid3d.config import load_recipe
from hybrid3d.planning.hardware import count_training_groups

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

NOTE = """
import os, sys
if "RANK" in os.environ and "hybrid3d" in sys.orig_argv:  # not in processes of rewards
    from hybrid3d.watch import heartbeat
    enter, noted = heartbeat.enter_phase, {}

    def groups():
        import torch.distributed as dist
        found = {}
        for group in list(dist.distributed_c10d._world.pg_map):
            if isinstance(group, dist.ProcessGroup) and group.size() > 1:
                found[group.group_name] = {
                    "description": group.group_desc,
                    "operations": group._get_sequence_number_for_group(),
                    "timeouts": [group._get_backend(d).options._timeout.total_seconds() for d in group._device_types],
                }
        return found

    def starting():
        from hybrid3d.rollout import engine
        make = engine.RolloutEngine.__init__
        def noting(*args, **more):
            noted["before"] = groups()
            make(*args, **more)
        engine.RolloutEngine.__init__ = noting

    def ending():
        from hybrid3d.trainer import trainer
        close = trainer.Trainer.close
        def noting(*args):
            noted["end"] = groups()
            with open(f"groups-{os.environ['RANK']}.json", "w") as file:
                __import__("json").dump(noted, file)
            close(*args)
        trainer.Trainer.close = noting

    class Importing:
        '''Patches modules as soon as they have been imported.'''
        wanted = {"hybrid3d.rollout.engine": starting, "hybrid3d.trainer.trainer": ending}
        def find_spec(self, name, path=None, target=None):
            if name not in self.wanted:
                return None
            patch = self.wanted.pop(name)
            spec = __import__("importlib.util").util.find_spec(name)
            run = spec.loader.exec_module
            def executing(module):
                run(module)
                patch()
            spec.loader.exec_module = executing
            return spec
    sys.meta_path.insert(0, Importing())
    for name in [name for name in Importing.wanted if name in sys.modules]:
        Importing.wanted.pop(name)()
"""

SMALL = [
    *("run.steps=2", "run.eval_every=1", "run.checkpoint_every=1", "run.record=always"),
    *("algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2"),
]
Groups = dict[str, dict[str, Any]]


def run(folder: Path, *settings: str) -> list[tuple[Groups, Groups]]:
    """Run a few steps, and return the groups of each rank when vLLM starts and when the run ends."""
    (folder / "also").mkdir()
    (folder / "also" / "sitecustomize.py").write_text(NOTE)
    hybrid3d(folder, "train", str(ROOT / "recipes/demo-cpu.yaml"), *SMALL, *settings, also=folder / "also")
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("groups-*.json"))]
    assert len(found) == 4
    return [(one["before"], one["end"]) for one in found]


@pytest.fixture(scope="module")
def stages(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Groups, Groups]]:
    """TP2 x PP2 of the demo's model."""
    folder = demo_folder(tmp_path_factory.mktemp("stages"), demo)
    return run(folder, "model.path=build/demo/base", "train.micro_batch_size=4", "rollout.kv_cache_gib=0.0625")


@pytest.fixture(scope="module")
def experts(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Groups, Groups]]:
    """TP2 x DP2 with experts over EP2."""
    folder = tmp_path_factory.mktemp("experts")
    experts_folder(folder, demo, "qwen3_moe")
    return run(folder, *EXPERTS, "train.pp=1", "train.dp=2", "train.ep=2", "train.micro_batch_size=2")


def planned_groups(layout: str) -> int:
    """Return the number of communicators that `plan` counts for training and syncs."""
    settings = [] if layout == "stages" else ["train.pp=1", "train.dp=2", "train.ep=2"]
    recipe = load_recipe(ROOT / "recipes/demo-cpu.yaml", ["train.micro_batch_size=2", *settings])
    return count_training_groups(recipe, has_experts=layout == "experts")


LAYOUTS = pytest.mark.parametrize("layout", [pytest.param("stages", marks=pytest.mark.slow), "experts"])


@LAYOUTS
def test_process_groups_do_not_give_up_late_ranks(layout: str, request: pytest.FixtureRequest) -> None:
    """Whoever made the group: we, Megatron, vLLM or torch."""
    for _, end in request.getfixturevalue(layout):
        assert {"default_pg", "TENSOR_MODEL_PARALLEL_GROUP"} <= {group["description"] for group in end.values()}
        assert len(end) >= 6
        short = {name: group for name, group in end.items() if min(group["timeouts"]) < 24 * 3600}
        assert short == {}


@LAYOUTS
def test_training_and_sync_groups_are_used_before_vllm_starts(layout: str, request: pytest.FixtureRequest) -> None:
    """Over NCCL the first use of a group takes memory, which vLLM's cache may have taken by then."""
    for before, end in request.getfixturevalue(layout):
        later = {name for name in before if end[name]["operations"] > before[name]["operations"]}
        assert later
        made = [group for group in before.values() if group["operations"] and group["description"] != "default_pg"]
        assert len(made) == planned_groups(layout), [group["description"] for group in made]
        first_used_later = {before[name]["description"] for name in later if not before[name]["operations"]}
        assert first_used_later == set()
        assert "weights" in {before[name]["description"] for name in later}
        made_later = {group["description"] for name, group in end.items() if name not in before}
        assert made_later <= {"undefined"}, "only vLLM makes groups later, before it sizes its cache"

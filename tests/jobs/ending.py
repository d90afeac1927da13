"""Two ranks that end at different times; what the task of rank 1 calls kills its pool and leaves a process behind."""

import sys
import time
from contextlib import closing
from pathlib import Path

from hybrid3d import launch_environment
from hybrid3d.config import load_recipe
from hybrid3d.launch.rank import run_rank
from hybrid3d.ledger import RankStart
from hybrid3d.run.folder import RunFolder
from hybrid3d.scoring.scorer import FunctionScorer, Query
from hybrid3d.watch.heartbeat import enter_phase

recipe, folder, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])


def task(start: RankStart) -> None:
    """Of rank 0: to go on for so many seconds after rank 1 has ended."""
    rank = start.rank
    enter_phase("train")

    def work() -> None:  # a call of its own each time: a rank that stays in one call is named
        time.sleep(0.1)

    if rank == 1:
        time.sleep(3)  # in which a beat has told of the phase
        with closing(FunctionScorer("leaving:kills_its_pool", workers=1, timeout_seconds=20.0, default=0.0)) as scorer:
            scores = scorer.score([Query("daemon", "", "")])
        (folder / "scores").write_text(str(scores.failures))
        return
    while not (folder / "over").exists():
        work()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        work()


code = run_rank(load_recipe(Path(recipe)), RunFolder(folder), task, launched=False)
if launch_environment.rank() == 1:
    (folder / "over").touch()
sys.exit(code)

"""Audit what runs on CUDA without a GPU: PYTHONPATH=src:tests python -m audit, which `make audit-cuda` does.

Makes an environment with the CUDA builds (several GB of downloads, once), runs each check as a process with a time
limit, and puts in faults that the checks must find. Each fact becomes a line of FOLDER/facts.jsonl; at the end
FOLDER/report.md says what was proven against which versions. The exit code is 0 if everything was proven and every
fault was found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from audit import environment, page
from audit.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
GPUS = {"h100": "a faked H100", "b200": "a faked B200"}
PRECISION = {"bfloat16": "bfloat16", "fp8": "FP8 with scales of blocks", "mxfp8": "MXFP8 (as of a checkpoint in it)"}
QUANTIZED = ("qwen2", "qwen3_moe", "deepseek_v3")  # a model of each kind: dense, of experts, with latent attention


@dataclass(frozen=True)
class Check:
    """A check.

    Attributes:
        module: in this folder.
        proves: what it proves, for the page.
        limit: seconds that each of its processes may take.
        compared: whether both builds answer and the answers must be equal; else the CUDA build lists problems.
        part: of the module.
        device: the kind of GPU that is faked, as in `fake_device.DEVICES`.
        families: of models; empty for all.
    """

    module: str
    proves: str
    limit: float
    compared: bool = False
    part: str | None = None
    device: str = "h100"
    families: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.module if self.part is None else f"{self.module}-{self.part}"


@dataclass(frozen=True)
class Fact:
    """What one check found about one subject; `found` is empty where the fact is proven."""

    check: str
    subject: str
    found: str
    fault: str | None = None

    @property
    def proven(self) -> bool:
        return not self.found


CHECKS = (
    Check(
        "names",
        "every name of vLLM, Megatron, Transformer Engine and private name of torch that is used exists, with the CPU "
        "build's parameters",
        limit=300,
        compared=True,
    ),
    Check("demand", "vLLM's demand, constants and KV cache are the CPU build's", limit=1500, compared=True),
    *(
        Check(
            "finalization",
            f"on {GPUS[device]} in {PRECISION[precision]}: after three syncs, each into memory that was overwritten, "
            "every tensor of the model and its kernels is what vLLM's own loading makes of the weights, in its place; "
            "no stream was synchronized, and no replaced kernel keeps a copy",
            limit=2400,
            part=f"{device}-{precision}",
            families=QUANTIZED if precision != "bfloat16" else (),
        )
        for device, precision in (
            ("h100", "bfloat16"),
            ("h100", "fp8"),
            ("b200", "bfloat16"),
            ("b200", "fp8"),
            ("b200", "mxfp8"),
        )
    ),
    Check(
        "attributes",
        "with Transformer Engine's modules Megatron holds the same pieces as with torch's, and their parameters carry "
        "the same marks (tensor_model_parallel, allreduce, sequence_parallel; partition_dim but for routed experts)",
        limit=900,
        compared=True,
    ),
    *(
        Check(
            "contexts",
            f"asking {engine} allocates nothing on a GPU, with contexts on the rank's own only",
            900,
            part=part,
        )
        for part, engine in (
            ("megatron", "Megatron (torch's layers)"),
            ("transformer-engine", "Megatron (Transformer Engine's modules)"),
            ("vllm", "vLLM"),
        )
    ),
)


class Audit:
    """Runs checks in a folder, and writes down their facts."""

    def __init__(self, folder: Path, replaced: Mapping[str, str]):
        self.folder = folder.resolve()
        self.seconds: dict[str, float] = {}
        self.environment = environment.make(self.folder, replaced)
        (self.folder / "answers").mkdir(exist_ok=True)
        self._lines = (self.folder / "facts.jsonl").open("w")
        failure = self._run("models", [sys.executable, "-m", "audit.cases", str(self.models)], 300)
        if failure:
            raise RuntimeError(f"no tiny models: {failure} (answers/models.log in {self.folder})")

    @property
    def models(self) -> Path:
        return self.folder / "models"

    def prove(self, check: Check, fault: str | None = None) -> list[Fact]:
        """Run a check, with a fault in the CUDA environment or without, and return its facts."""
        start = time.monotonic()
        answered: dict[str, dict[str, Any]] = {}
        facts: list[Fact] = []
        for build in ["cpu", "cuda"] if check.compared else ["cuda"]:
            name = ".".join(filter(None, [check.name, build, fault]))
            file = self.folder / "answers" / f"{name}.jsonl"
            file.unlink(missing_ok=True)
            failure = self._run(name, self._command(check, build, file, fault), check.limit)
            facts += [Fact(check.name, f"the process of the {build} build", failure, fault)] if failure else []
            lines = file.read_text().splitlines() if file.exists() else []
            answered[build] = {one["subject"]: one["found"] for one in map(json.loads, lines)}
        for subject, found in answered["cuda"].items():
            expected = answered["cpu"].get(subject, "no answer") if check.compared else []
            facts.append(Fact(check.name, subject, page.difference(found, expected), fault))
        missing = answered.get("cpu", {}).keys() - answered["cuda"].keys()
        facts += [Fact(check.name, subject, "no answer of the CUDA build", fault) for subject in sorted(missing)]
        if not answered["cuda"]:
            facts.append(Fact(check.name, "the check", "no answer", fault))
        self.seconds[f"{check.name}{f' with {fault}' if fault else ''}"] = time.monotonic() - start
        for fact in facts:
            print(json.dumps(asdict(fact) | {"proven": fact.proven}), file=self._lines, flush=True)
        return facts

    def _command(self, check: Check, build: str, answers: Path, fault: str | None) -> list[str]:
        python = sys.executable if build == "cpu" else str(self.environment.python)
        options = {"--models": self.models, "--build": build, "--answers": answers}
        options |= {"--transformer-engine": self.environment.transformer_engine, "--device": check.device}
        options |= {"--part": check.part} if check.part else {}
        options |= {"--inject": fault} if fault and build == "cuda" else {}
        words = [str(word) for option in options.items() for word in option]
        families = (FAULTS[fault].family,) if fault else check.families
        return [python, "-m", f"audit.{check.module}", *words, *(("--families", *families) if families else ())]

    def _run(self, name: str, command: list[str], limit: float) -> str:
        """Run a process with its output in a log; return why it failed, or nothing."""
        variables = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
        variables.pop("CUDA_VISIBLE_DEVICES", None)
        if command[0] != sys.executable:
            variables["LD_LIBRARY_PATH"] = str(self.environment.stub)
        log = self.folder / "answers" / f"{name}.log"
        try:
            with log.open("w") as output:
                subprocess.run(
                    command, env=variables, stdout=output, stderr=output, timeout=limit, check=True, cwd=ROOT
                )
        except subprocess.TimeoutExpired:
            return f"not done after {limit:.0f} s"
        except subprocess.CalledProcessError as error:
            last = log.read_text().strip().splitlines()[-1:]
            return f"exit code {error.returncode}: {''.join(last)}"
        return ""


def find_fault(audit: Audit, name: str, fault: Fault, base: list[Fact]) -> Fact:
    """Put a fault in, and say whether the check finds it where nothing was found before."""
    check = next(one for one in CHECKS if one.module == fault.check and fault.part in (None, one.part))
    before = {(fact.check, fact.subject, fact.found) for fact in base}
    new = [fact for fact in audit.prove(check, name) if (fact.check, fact.subject, fact.found) not in before]
    found = [fact for fact in new if fact.found and fault.matches(f"{fact.subject}: {fact.found}")]
    print(f"  {'found' if found else 'NOT FOUND'}: {fault.what}", flush=True)
    first = f"{found[0].check}: {found[0].subject}: {found[0].found}" if found else ""
    return Fact(check.name, first, "" if found else "not found", name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("build/audit"), help="the environment, logs and facts")
    parser.add_argument("--out", type=Path, help="the page (default: report.md in the folder)")
    parser.add_argument("--only", nargs="*", choices=sorted({check.module for check in CHECKS}), help="these checks")
    parser.add_argument("--inject", nargs="*", choices=sorted(FAULTS), help="these faults (default: all)")
    parser.add_argument(
        "--versions",
        nargs="*",
        default=[],
        metavar="NAME==VERSION",
        help="audit these, such as vllm==0.33.0 torch==2.14.0, in a --folder of their own (default: as on CPUs here)",
    )
    given = parser.parse_args()
    start = time.monotonic()
    audit = Audit(given.folder, dict(one.split("==") for one in given.versions))
    facts: list[Fact] = []
    chosen = [check for check in CHECKS if given.only is None or check.module in given.only]
    for check in chosen:
        facts += (proven := audit.prove(check))
        wrong = [fact for fact in proven if not fact.proven]
        seconds = audit.seconds[check.name]
        print(f"{check.name}: {len(proven) - len(wrong)} of {len(proven)} proven, {seconds:.0f} s", flush=True)
        for fact in wrong:
            print(f"  NOT PROVEN: {fact.subject}: {fact.found}", flush=True)
    names = FAULTS.keys() if given.inject is None else given.inject
    injected = [name for name in names if FAULTS[name].check in {check.module for check in chosen}]
    found = {name: find_fault(audit, name, FAULTS[name], facts) for name in injected}
    out = given.out or given.folder / "report.md"
    total = time.monotonic() - start
    out.write_text(page.page(audit.environment, chosen, facts, found, audit.seconds, total))
    print(f"{total:.0f} s; the page is {out}")
    return 0 if all(fact.proven for fact in [*facts, *found.values()]) else 1


if __name__ == "__main__":
    sys.exit(main())

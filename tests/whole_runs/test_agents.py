"""Agents that make a run's answers, in real runs: by OpenAI's own client, and by clients that break every rule."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from commands import EXPERTS, ROOT, experts_folder, hybrid3d, python, read_events, read_rows
from hybrid3d.replay.step_record import read_step
from hybrid3d.run.folder import RunFolder, recorded_folder
from servers import free_ports_in_a_row

pytestmark = [pytest.mark.engines, pytest.mark.timeout(900)]

# Short, because every character of it is a token here
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<eos>{% endfor %}"
STEPS, TURNS = 4, 20
HELD_OUT = 8
KEY = "key of these tests"


def prepare(work: Path, demo: Path) -> Path:
    """Prepare a folder with a model whose weights are random and wide, so that every token of the context matters."""
    experts_folder(work, demo, "qwen2")
    pq.write_table(pq.read_table(demo / "eval.parquet").slice(0, HELD_OUT), work / "eval.parquet")
    return work


def prepare_chats(work: Path, demo: Path) -> Path:
    """Prepare a folder as `prepare` does, with a chat template, and a folder for calls."""
    return with_template(prepare(work, demo))


def with_template(work: Path) -> Path:
    """Give the model of a folder a chat template, and make a folder for calls."""
    (work / "calls").mkdir()
    config = json.loads((work / "model/tokenizer_config.json").read_text())
    (work / "model/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return work


def train(work: Path, agent: str, *settings: str) -> None:
    command = f"{sys.executable} {ROOT}/tests/jobs/{agent}"
    hybrid3d(
        work,
        "train",
        str(ROOT / "recipes/demo-cpu.yaml"),
        *(setting for setting in EXPERTS if "micro_batch" not in setting),
        "data.eval=eval.parquet",
        "rollout.max_model_len=256",
        "rollout.max_new_tokens=220",
        f"rollout.agents.command={command}",
        f"rollout.agents.port={free_ports_in_a_row(4)}",
        *settings,
        timeout=800,
    )


def calls_of_samples(run: Path, step: int) -> Counter[str]:
    """Return each run of generated tokens in a step's samples, with the tokens before it and its log-probabilities."""
    calls: Counter[str] = Counter()
    for sample in read_step(recorded_folder(RunFolder(run), step)).samples:
        context, logprobs = sample.prompt_ids.tolist(), sample.logprobs.tolist()
        pairs = zip(sample.loss_mask.tolist(), sample.tokens.tolist(), strict=True)
        for own, group in groupby(pairs, lambda pair: pair[0]):
            tokens = [token for _, token in group]
            if own:
                calls[json.dumps([context, tokens, logprobs[: len(tokens)]])] += 1
                del logprobs[: len(tokens)]
            context = context + tokens
    return calls


@pytest.mark.slow
def test_ten_thousand_turns_are_trained_token_by_token(demo: Path, tmp_path: Path) -> None:
    """With histories that the agent sends as text each time, and edits: what it was given is what is trained."""
    work = prepare_chats(tmp_path, demo)
    train(
        work,
        f"agent_chats.py {work}/calls {TURNS}",
        "name=chats",
        f"run.steps={STEPS}",
        "run.record=always",
        "algorithm.prompts_per_step=16",
        "algorithm.samples_per_prompt=8",
        "train.max_tokens_per_micro_batch=2048",
    )
    told: dict[int, Counter[str]] = {step: Counter() for step in range(STEPS + 1)}
    for path in (work / "calls").iterdir():
        for call in map(json.loads, path.read_text().splitlines()):
            if not call["greedy"]:
                told[call["step"]][json.dumps(call["call"])] += 1
    trained = {step: calls_of_samples(work / "runs/chats", step) for step in range(STEPS)}
    assert sum(counts.total() for counts in trained.values()) >= 10_000
    for step, calls in trained.items():
        assert calls == told[step]
    for row in read_rows(work / "runs/chats"):
        assert row["reward/failures"] == 0
        assert row["rollout/branches_mean"] > 1.2
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3  # Megatron reads every branch as vLLM did
    for row in read_rows(work / "runs/chats")[:-1]:
        assert row["train/ratio"] == pytest.approx(1.0, abs=1e-5)
        assert row["train/grad_norm"] > 0
    hybrid3d(work, "replay", "runs/chats", "--step", "1")  # bit for bit
    hybrid3d(work, "replay", "runs/chats", "--step", "1", "train.pp=1", "train.dp=2")  # fills up another number


@pytest.mark.slow
def test_agents_make_answers_ahead_on_ranks_of_their_own(demo: Path, tmp_path: Path) -> None:
    work = prepare_chats(tmp_path, demo)
    train(
        work,
        f"agent_chats.py {work}/calls 3",
        "name=ahead",
        "run.steps=3",
        "run.record=always",
        "train.pp=1",
        "rollout.tp=1",
        "roles.generation.ranks=2",
        "async.max_staleness=1",
        "algorithm.correction.kind=truncate",
        "rollout.top_p=0.9",
        "rollout.stop=['w']",
        "algorithm.prompts_per_step=4",
        "algorithm.samples_per_prompt=4",
        "train.max_tokens_per_micro_batch=2048",
    )
    told: Counter[str] = Counter()
    for path in (work / "calls").iterdir():
        for call in map(json.loads, path.read_text().splitlines()):
            told[json.dumps(call["call"])] += not call["greedy"]
    for step in range(3):
        assert calls_of_samples(work / "runs/ahead", step) <= told
    rows = read_rows(work / "runs/ahead")
    assert [row["rollout/staleness_max"] for row in rows] == [0, 1, 1, 1]
    assert all(0.9 <= row["rollout/kept_probability_mean"] < 0.99 for row in rows)
    assert 0 < rows[0]["mismatch/logprob_abs_max"] <= 1e-3
    assert all(row["reward/failures"] == 0 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("partial", ["continue", "continue_with_cache", "restart"])
def test_steps_do_not_wait_for_their_longest_sessions(demo: Path, tmp_path: Path, partial: str) -> None:
    """Whatever is trained was given to an agent, token by token; restarted sessions end for their agents."""
    work = prepare_chats(tmp_path, demo)
    train(
        work,
        f"agent_chats.py {work}/calls {TURNS}",
        "name=partial",
        f"run.steps={STEPS}",
        "run.record=always",
        "run.eval_every=2",
        f"async.partial={partial}",
        "async.max_staleness=2",
        "algorithm.correction.kind=truncate",
        "algorithm.prompts_per_step=8",
        "algorithm.samples_per_prompt=4",
        "train.max_tokens_per_micro_batch=2048",
        "sync.verify=always",
        *(["rollout.sleep=false"] if partial == "continue_with_cache" else []),
    )
    told, ended = Counter[str](), 0
    for path in (work / "calls").iterdir():
        for call in map(json.loads, path.read_text().splitlines()):
            told[json.dumps(call["call"])] += not call["greedy"]
            ended += call["call"] is None
    rows, versions = read_rows(work / "runs/partial"), list[int]()
    for step in range(STEPS):
        trained = calls_of_samples(work / "runs/partial", step)
        assert trained <= told
        assert trained.total() >= 8 * 4
        samples = read_step(recorded_folder(RunFolder(work / "runs/partial"), step)).samples
        versions += [len(sample.versions.runs) for sample in samples]
        assert all(step - 2 <= min(sample.versions) <= max(sample.versions) <= step for sample in samples)
    assert all(row["sync/received_bytes"] == row["sync/lower_bound_bytes"] for row in rows)
    assert all(row["reward/failures"] == 0 for row in rows)
    assert min(row["rollout/unfinished_prompts"] for row in rows[:-1]) > 0
    if partial == "restart":
        assert sum(row["rollout/dropped_tokens"] for row in rows) > 0
        assert (max(versions), ended > 0) == (1, True)
    else:
        assert sum(row["rollout/dropped_tokens"] for row in rows) == ended == 0
        assert max(versions) > 1
        assert max(row["rollout/continued_fraction"] for row in rows) > 0


@pytest.mark.slow
def test_experts_of_every_branch_are_replayed(demo: Path, tmp_path: Path) -> None:
    """In float32 training's routers choose as vLLM's did: for each branch, also where a call was given up."""
    experts_folder(tmp_path, demo, "qwen3_moe")
    work = with_template(tmp_path)
    train(
        work,
        f"agent_chats.py {work}/calls 6",
        "name=replay",
        "run.steps=2",
        "run.record=always",
        "train.router_replay=rollout",
        "algorithm.prompts_per_step=4",
        "algorithm.samples_per_prompt=4",
        "train.max_tokens_per_micro_batch=2048",
        "data.eval=build/demo/eval.parquet",
    )
    for row in read_rows(work / "runs/replay"):
        assert row["mismatch/missing_expert_choices"] == 0
        assert row["mismatch/expert_agreement"] > 0.999
        assert row["rollout/branches_mean"] > 1
        assert 0 < row["mismatch/logprob_abs_max"] <= 1e-3
    for sample in read_step(recorded_folder(RunFolder(work / "runs/replay"), 1)).samples:
        assert len(sample.experts) == len(sample.prompt_ids) + len(sample.tokens) - 1


@pytest.mark.slow
def test_dynamic_sampling_replaces_prompts_of_unfinished_batches(demo: Path, tmp_path: Path) -> None:
    """With partial rollouts, and rewards by agents: no group of equal rewards is trained where others suffice."""
    work = prepare_chats(tmp_path, demo)
    train(
        work,
        f"agent_chats.py {work}/calls 3",
        "name=dynamic",
        f"run.steps={STEPS}",
        "run.record=always",
        "async.partial=continue",
        "async.max_staleness=1",
        "algorithm.name=dapo",
        "algorithm.correction.kind=truncate",
        "algorithm.prompts_per_step=4",
        "algorithm.samples_per_prompt=2",  # of which half have equal rewards
        "train.max_tokens_per_micro_batch=2048",
    )
    rows = read_rows(work / "runs/dynamic")
    assert sum(row["rollout/zero_variance_groups"] for row in rows) > 0
    for step in range(STEPS):
        samples = read_step(recorded_folder(RunFolder(work / "runs/dynamic"), step)).samples
        rewards = [sample.reward for sample in samples if sample.last]
        assert len(rewards) == 4 * 2
        assert all(one != other for one, other in zip(rewards[::2], rewards[1::2], strict=True))


@pytest.fixture(scope="module")
def requests(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run whose agent asks for what cannot be, and what it was answered."""
    work = prepare(tmp_path_factory.mktemp("requests"), demo)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HYBRID3D_API_KEY", KEY)
        train(
            work,
            f"agent_requests.py {work}/answers.json",
            "name=requests",
            "run.steps=1",
            "run.record=always",
            "train.pp=1",  # one engine, so that one agent has all sessions
            "rollout.agents.timeout_seconds=6",
            "algorithm.prompts_per_step=4",
            "algorithm.samples_per_prompt=2",
            "train.max_tokens_per_micro_batch=2048",
        )
    return work / "runs/requests", json.loads((work / "answers.json").read_text())


REFUSALS = {
    "model": (404, "model_not_found", "model", "'gpt-9' does not exist: this run's is 'requests'"),
    "long": (400, "context_length_exceeded", "prompt", "300 tokens, and rollout.max_model_len=256"),
    "top_p": (400, "unsupported_value", "top_p", "samples are those of the policy's own distribution"),
    "n": (400, "unsupported_value", "n", "n=2"),
    "tokens": (400, "invalid_value", "prompt", "token ids from 0 to"),
    "max_tokens": (400, "invalid_value", "max_tokens", "expected a number of 1 or more"),
    "stop": (400, "invalid_value", "stop", "contains the special token '<eos>'"),
    "half": (400, "invalid_value", "prompt", "half of a surrogate pair"),
    "options": (400, "invalid_value", "stream_options", "expected an object"),
    "logprobs": (400, "invalid_value", "logprobs", "logprobs=5"),
    "unknown": (400, "unknown_parameter", "maximum", "unknown parameter: maximum"),
    "json": (400, "invalid_json", None, "the body is no JSON"),
    "list": (400, "invalid_json", None, "expected an object"),
    "template": (400, "no_chat_template", "messages", "use /v1/completions"),
    "session": (404, "no_session", None, "no such session"),
    "address": (404, "not_found", None, "GET /v1/nothing"),
    "key": (401, "invalid_api_key", None, "HYBRID3D_API_KEY"),
    "reward": (400, "invalid_value", "reward", "expected a finite number"),
}


def test_endpoint_refuses_impossible_requests_as_openai_does(requests: tuple[Path, dict[str, Any]]) -> None:
    assert requests[1]["refused"].keys() == REFUSALS.keys()
    for name, (status, code, param, message) in REFUSALS.items():
        found = requests[1]["refused"][name]
        assert found[:3] == [status, code, param], name
        assert message in found[3]
    assert requests[1]["ended"] == 404


def test_session_says_what_it_is_about(requests: tuple[Path, dict[str, Any]]) -> None:
    session = requests[1]["session"]
    assert session["base_url"] == f"http://127.0.0.1:{free_ports_in_a_row(4)}/sessions/{session['id']}/v1"
    assert session["answer"].startswith("#### ")
    assert (session["greedy"], session["step"]) == (True, 0)


def test_streams_and_crowds_are_answered(requests: tuple[Path, dict[str, Any]]) -> None:
    streamed = requests[1]["streamed"]
    assert streamed["models"] == ["requests"]
    assert (len(streamed["tokens"]), streamed["reason"], streamed["usage"]) == (6, "length", 6)
    assert streamed["text"]
    assert requests[1]["crowd"] == [True] * 200


def test_sessions_whose_agent_is_silent_end(requests: tuple[Path, dict[str, Any]]) -> None:
    """One was silent after a call: it counts as a failure. One was before any call: another agent got the session."""
    events = read_events(requests[0])
    failures = [event for event in events if event["event"] == "reward_failed"]
    assert [(event["failures"], event["held_out"]) for event in failures] == [({"agent_hung": 1}, True)]
    assert failures[0]["examples"] == {"agent_hung": "its agent made no call for 6 s"}


def test_agent_that_ends_ends_the_run_with_its_exit_code(demo: Path, tmp_path: Path) -> None:
    work = prepare(tmp_path, demo)
    (work / "agent.py").write_text("raise SystemExit(7)")
    settings = [*EXPERTS, f"rollout.agents.command={sys.executable} agent.py", "data.eval=eval.parquet", "run.steps=1"]
    with pytest.raises(AssertionError, match="ended with exit code 7 before the run did"):
        python(work, "-m", "hybrid3d", "train", str(ROOT / "recipes/demo-cpu.yaml"), *settings, "name=ends")

"""What is sampled with `top_p`, `top_k`, `min_p` and `stop`, by a real vLLM with TP2, and its log-probabilities."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from commands import experts_folder
from run_ranks import ROOT, run_ranks

pytestmark = [pytest.mark.engines, pytest.mark.processes, pytest.mark.timeout(300)]

STOP = "e"
TOLERANCE = 2e-4  # of float32 in two passes with other batches


@pytest.fixture(scope="module")
def model(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are random and wide, so that distributions are neither flat nor sharp."""
    return experts_folder(tmp_path_factory.mktemp("sampling"), demo, "qwen2")


@pytest.fixture(scope="module")
def said(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("said")
    run_ranks(ROOT / "tests/jobs/sampling.py", 2, [str(model), STOP, str(out)], timeout=240)
    one, other = (json.loads((out / f"{rank}.json").read_text()) for rank in range(2))
    assert one["finish reasons"] == other["finish reasons"]
    completions = [name for name in one if "prompts" not in name and name != "finish reasons"]
    assert [tokens_of(one[name]) for name in completions] == [tokens_of(other[name]) for name in completions]
    return one  # type: ignore[no-any-return]


def tokens_of(completions: list[dict[str, Any]]) -> list[list[int]]:
    return [completion["tokens"] for completion in completions]


@pytest.mark.parametrize("name", ["top_k_1", "min_p_1", "top_p_0"])
def test_sampling_from_one_token_is_greedy(said: dict[str, Any], name: str) -> None:
    assert tokens_of(said[name]) == tokens_of(said["greedy"])
    assert all(0 < kept < 1 for one in said[name] for kept in one["kept"])
    for one in said[name]:  # what was kept is that token
        assert [math.exp(logprob) for logprob in one["logprobs"]] == pytest.approx(one["kept"], abs=1e-6)


def test_seeds_repeat(said: dict[str, Any]) -> None:
    assert said["repeated"] == said["whole"]
    assert tokens_of(said["reseeded"]) != tokens_of(said["whole"]) != tokens_of(said["greedy"])


@pytest.mark.parametrize("name", ["whole", "top_k", "top_p", "min_p"])
def test_log_probabilities_are_of_the_whole_distribution(said: dict[str, Any], name: str) -> None:
    """As vLLM computes them for the same tokens in a prompt, where nothing is sampled."""
    count = 0
    for one, steps in zip(said[name], said[f"{name} as prompts"], strict=True):
        assert one["logprobs"] == pytest.approx([step[0] for step in steps], abs=TOLERANCE)
        assert len(one["kept"]) == (0 if name == "whole" else len(one["tokens"]))
        for kept, (logprob, *most_likely) in zip(one["kept"], steps, strict=False):
            expected = kept_of(name, [math.exp(value) for value in most_likely])
            if expected is not None:
                count += 1
                assert kept == pytest.approx(expected, abs=1e-3)
                assert math.exp(logprob) <= kept + 1e-3
    assert count > 20 or name == "whole"


def kept_of(name: str, probabilities: list[float]) -> float | None:
    """Return what a setting keeps of the most likely tokens, if these are all of it, and none is near its bound."""
    if name == "top_k":
        return sum(probabilities[:5])
    if name == "top_p":
        total = 0.0
        for probability in probabilities:
            if abs(total - 0.5) < 1e-4:
                return None
            if total > 0.5:
                return total
            total += probability
        return None
    bound = 0.3 * probabilities[0]
    if probabilities[-1] > bound or any(abs(probability - bound) < 1e-4 for probability in probabilities):
        return None
    return sum(probability for probability in probabilities if probability > bound)


def test_temperature_and_all_of_them_together(said: dict[str, Any]) -> None:
    assert all(not one["kept"] for one in said["hot"])
    assert all(0.05 < kept <= 1 for one in said["all"] for kept in one["kept"])
    assert any(kept < 0.95 for one in said["all"] for kept in one["kept"])


def test_greedy_and_sampled_requests_in_one_batch(said: dict[str, Any]) -> None:
    greedy, sampled = said["mixed"]
    assert greedy == said["greedy"][0]
    assert sampled["tokens"] == said["top_k"][1]["tokens"]
    assert sampled["kept"] == pytest.approx(said["top_k"][1]["kept"], abs=1e-4)


@pytest.mark.parametrize(
    ("name", "without"),
    [("stopped", "whole"), ("stopped stepwise", "whole"), ("stopped greedily", "greedy")],
)
def test_stop_ends_an_answer_with_token_that_completes_it(
    model: Path, said: dict[str, Any], name: str, without: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ended = 0
    for one, whole in zip(said[name], said[without], strict=True):
        tokens, length = whole["tokens"], len(one["tokens"])
        assert one["tokens"] == tokens[:length]
        assert one["logprobs"] == pytest.approx(whole["logprobs"][:length], abs=TOLERANCE)
        texts = [tokenizer.decode(tokens[:n], skip_special_tokens=True) for n in range(length + 1)]
        assert not any(STOP in text for text in texts[:length])
        assert one["stopped"] == (STOP in texts[length])
        assert one["stopped"] or length == len(tokens)
        ended += one["stopped"]
    assert ended >= 3


@pytest.mark.parametrize("how", ["at the last token", "at the last token stepwise"])
def test_answer_is_truncated_if_vllm_says_so(said: dict[str, Any], how: str) -> None:
    """Of answers of five tokens, the most that they may have, those are complete that end with one that ends them."""
    truncated = [one["truncated"] for one in said[how]]
    assert truncated == [reason == "length" for reason in said["finish reasons"]]
    longest = [one["truncated"] for one in said[how] if len(one["tokens"]) == 5]
    assert True in longest
    assert False in longest


def test_samplers_of_both_model_runners_tell_both_numbers() -> None:
    """The second runner's kernels need a GPU: a function stands for them that samples as they do.

    The sampler, what it asks about requests, and what it returns are vLLM's own.
    """
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    from hybrid3d.rollout.truncation import kept_probability, second_runner

    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0], [5.0, 1.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    temperatures, tokens = torch.tensor([9.0, 2.0, 0.0, 0.5]), torch.tensor([[1], [0], [3]])
    rows = torch.tensor([3, 1, 2])  # the requests' places in the tables

    def sample(self: Any, given: torch.Tensor, batch: Any) -> Any:
        truncated = given / temperatures[batch.expanded_idx_mapping].clamp(min=1e-9)[:, None]
        truncated[:, 2] = -math.inf
        logprobs = truncated.log_softmax(1)
        ids = torch.cat([tokens, logprobs.topk(self.dims[0]).indices], 1)
        tensors = LogprobsTensors(ids.int(), logprobs.gather(1, ids), torch.ones(3))
        one_each = torch.ones(3, dtype=torch.int32)
        return SamplerOutput(tokens.int(), tensors, None, one_each, one_each - 1)

    def sampler(dims: tuple[int, int]) -> Any:
        found = Sampler.__new__(Sampler)
        found.dims, found.sampling_states = dims, SamplingStates.__new__(SamplingStates)
        found.sampling_states.temperature = SimpleNamespace(gpu=temperatures)
        found.sampling_states.num_logprobs = np.full(4, dims[0], dtype=np.int32)
        found.logprob_token_ids_state = SimpleNamespace(max_num_token_ids=lambda rows: dims[1])
        return found

    batch = InputBatch.__new__(InputBatch)
    batch.idx_mapping_np, batch.expanded_idx_mapping = rows.numpy(), rows
    ids, logprobs, ranks, *_ = second_runner(sample)(sampler((1, 0)), logits, batch).logprobs_tensors
    whole = (logits[:2] / torch.tensor([[0.5], [2.0]])).softmax(1)
    for row, token in ((0, 1), (1, 0)):
        found = {int(i): SimpleNamespace(logprob=float(x)) for i, x in zip(ids[row], logprobs[row], strict=True)}
        assert len(found) == 2
        assert math.exp(found[token].logprob) == pytest.approx(float(whole[row, token]), rel=1e-5)
        assert kept_probability(found, token) == pytest.approx(float(1 - whole[row, 2]), rel=1e-5)
    assert ids.dtype == torch.int32
    assert len(ranks) == 3
    untouched = second_runner(sample)(sampler((0, 0)), logits, batch).logprobs_tensors
    assert untouched.logprobs.shape == (3, 1)
    assert kept_probability({5: SimpleNamespace(logprob=-1.0)}, 5) is None


def test_requests_are_ended_in_the_order_given() -> None:
    from hybrid3d.rollout.patches import abort_one_by_one

    ended: list[list[str]] = []
    abort_one_by_one(lambda client, ids: ended.append(ids))(None, ["3", "1", "2"])
    assert ended == [["3"], ["1"], ["2"]]

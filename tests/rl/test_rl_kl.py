"""KL estimators against a categorical distribution, where every expectation is a finite sum."""

import math

import pytest
import torch
from torch import Tensor

from hybrid3d.config.sections.algorithm import Kl
from hybrid3d.rl.kl import ESTIMATORS, KlController, token_kl

ONES = torch.ones(1, 1)


def estimate(name: str, policy: float, reference: float) -> float:
    """The estimate at one token with these probabilities."""
    return token_kl(name, torch.tensor([[policy]]).log(), torch.tensor([[reference]]).log(), ONES).item()


def test_against_numbers_worked_by_hand() -> None:
    """p = 0.5, reference 0.25: log r = -ln 2 = -0.6931472; k2 = 0.2402265; k3 = 1/2 - 1 + ln 2 = 0.1931472."""
    assert estimate("k1", 0.5, 0.25) == pytest.approx(0.6931472, abs=1e-6)
    assert estimate("k2", 0.5, 0.25) == pytest.approx(0.2402265, abs=1e-6)
    assert estimate("k3", 0.5, 0.25) == pytest.approx(0.1931472, abs=1e-6)
    # The other way round log r = ln 2, so k3 = 2 - 1 - ln 2.
    assert estimate("k3", 0.25, 0.5) == pytest.approx(0.3068528, abs=1e-6)


def test_k3_keeps_its_digits_where_policies_are_close() -> None:
    """Two policies 1e-4 apart: x^2/2 + x^3/6 = 5.0001667e-9, which float32's exp(x) - 1 - x gets wrong by half."""
    value = token_kl("k3", torch.zeros(1, 1), torch.full((1, 1), 1e-4), ONES).item()
    assert value == pytest.approx(5.0001667e-9, rel=5e-3)


@pytest.fixture
def policies() -> tuple[Tensor, Tensor]:
    """Logits of a policy, with gradients, and log-probabilities of a reference, over 7 tokens, in float64."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    return logits, reference


def exact_kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) by its definition, from log-probabilities."""
    return (p.exp() * (p - q)).sum()


def expected(name: str, policy: Tensor, reference: Tensor) -> Tensor:
    """The estimator's expectation over tokens that the policy samples; sampling itself has no gradient."""
    tokens = token_kl(name, policy[None], reference[None], torch.ones(1, len(policy)))[0]
    return (policy.exp().detach() * tokens).sum()


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_unbiased(name: str, policies: tuple[Tensor, Tensor]) -> None:
    logits, reference = policies
    policy = logits.log_softmax(0)
    torch.testing.assert_close(expected(name, policy, reference), exact_kl(policy, reference))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_gradient_in_expectation(name: str, policies: tuple[Tensor, Tensor]) -> None:
    """What the module says of each as a loss: 0, that of KL(policy || reference), that of KL(reference || policy)."""
    logits, reference = policies
    policy = logits.log_softmax(0)
    target = {"k1": 0 * logits.sum(), "k2": exact_kl(policy, reference), "k3": exact_kl(reference, policy)}[name]
    (wanted,) = torch.autograd.grad(target, logits, retain_graph=True)
    (found,) = torch.autograd.grad(expected(name, policy, reference), logits)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("name", "share"), [("k1", 1.0), ("k2", 0.05), ("k3", 0.05)])
def test_reward_kl_holds_a_close_policy_only_with_k1(name: str, share: float, policies: tuple[Tensor, Tensor]) -> None:
    """E[estimate x gradient of log policy], beside the gradient of KL(policy || reference)."""
    logits, _ = policies
    policy = logits.log_softmax(0)
    reference = (logits + 0.03 * torch.arange(7)).log_softmax(0).detach()
    (wanted,) = torch.autograd.grad(exact_kl(policy, reference), logits, retain_graph=True)
    reward = token_kl(name, policy[None], reference[None], torch.ones(1, 7))[0].detach()
    (found,) = torch.autograd.grad((policy.exp().detach() * reward * policy).sum(), logits)
    if share == 1:
        torch.testing.assert_close(found, wanted)
    else:
        assert found.norm() < share * wanted.norm()


@pytest.mark.parametrize("name", list(ESTIMATORS))
def test_padding_is_zero_in_value_and_gradient_whatever_it_holds(name: str) -> None:
    logprobs = torch.tensor([[-1.0, -math.inf, math.nan, -1e30]], requires_grad=True)
    reference = torch.tensor([[-1.5, 0.0, 0.0, 0.0]])
    values = token_kl(name, logprobs, reference, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert values[0, 0] > 0
    assert values[0, 1:].tolist() == [0.0, 0.0, 0.0]
    (gradient,) = torch.autograd.grad(values.sum(), logprobs)
    assert gradient[0, 0] != 0
    assert gradient[0, 1:].tolist() == [0.0, 0.0, 0.0]


def low_var_kl(logprob: torch.Tensor, ref_logprob: torch.Tensor) -> torch.Tensor:
    """As verl 0.9.1 computes k3: the log-ratio is clamped to +-20 and the estimate to +-10, by `torch.clamp`."""
    kl = (ref_logprob - logprob).clamp(-20, 20)
    return (kl.exp() - kl - 1).clamp(-10, 10)


def test_k3_is_bounded_as_in_verl_unless_recipe_says_otherwise() -> None:
    logprobs = torch.tensor([[-9.0, -4.0, -2.0, -1.0, -30.0]], requires_grad=True)
    reference, mask = torch.tensor([[-1.0, -1.0, -1.5, -6.0, -1.0]]), torch.ones(1, 5)
    for kl in (Kl(where="loss", coef=0.1), Kl(where="reward", estimator="k3", coef=0.1)):
        found = token_kl(kl.effective_estimator, logprobs, reference, mask, kl.effective_clamp)
        wanted = low_var_kl(logprobs, reference)
        torch.testing.assert_close(found, wanted)
        assert (found == 10).sum() == 3
        torch.testing.assert_close(*(torch.autograd.grad(of.sum(), logprobs)[0] for of in (found, wanted)))
    assert Kl(where="loss", coef=0.1, clamp=3.0).effective_clamp == 3.0
    others = [Kl(where="reward"), Kl(where="loss", estimator="k2"), Kl(where="loss", estimator="k3+")]
    assert [kl.effective_clamp for kl in others] == [None] * 3


def test_k3_alone_is_bounded_and_at_20() -> None:
    """exp(20) - 1 - 20 = 485165174.41 and exp(-20) - 1 + 20 = 19.000000002; below 20 nothing is."""
    policy, reference = torch.tensor([[-100.0, 0.0, -19.0]]), torch.tensor([[0.0, -100.0, 0.0]])
    values = {name: token_kl(name, policy, reference, torch.ones(1, 3))[0].tolist() for name in ESTIMATORS}
    assert values["k3"] == pytest.approx([485165174.41, 19.0, math.exp(19) - 20])
    assert values["k1"] == [-100, 100, -19]
    assert values["k2"] == [5000, 5000, 180.5]


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known: k1, k2, k3"):
        token_kl("k4", ONES, ONES, ONES)


def test_controller_is_that_of_the_paper() -> None:
    """arXiv 1909.08593, section 2.2: e = clip(KL / target - 1, -0.2, 0.2), beta *= 1 + 0.1 e: ten batches a horizon."""
    control = KlController(coef=0.2, target=6.0, horizon=640)
    control.observe(6.6, answers=64)  # e = 0.1
    assert control.coef == pytest.approx(0.2 * 1.01)
    control.observe(60.0, answers=64)  # e is clipped to 0.2
    assert control.coef == pytest.approx(0.2 * 1.01 * 1.02)
    control.observe(0.0, answers=32)  # and to -0.2; half a batch moves it half as far
    assert control.coef == pytest.approx(0.2 * 1.01 * 1.02 * 0.99)


def test_kl_coefficient_without_a_target_stays() -> None:
    control = KlController(coef=0.2)
    control.observe(60.0, answers=64)
    assert control.coef == 0.2


def test_kl_that_is_no_number_moves_nothing() -> None:
    control = KlController(coef=0.2, target=6.0, horizon=640)
    control.observe(math.nan, answers=64)
    assert control.coef == 0.2
    control.observe(math.inf, answers=64)
    assert control.coef == pytest.approx(0.2 * 1.02)

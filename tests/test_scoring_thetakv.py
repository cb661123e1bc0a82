import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import many, seeds
from vllm_kvselect.scoring.thetakv import smoothed

lams = st.sampled_from((0.0, 0.1, 1.0, 15.0, 1e6))


def attention(seed: int, num_tokens: int) -> torch.Tensor:
    logits = 8 * torch.randn(3, num_tokens, generator=torch.Generator().manual_seed(seed))
    return torch.softmax(logits.double(), dim=-1)


@many
@given(seeds, st.integers(1, 50), lams)
def test_smoothing_keeps_the_mass_and_the_order(seed: int, num_tokens: int, lam: float) -> None:
    weights = attention(seed, num_tokens)
    smooth = smoothed(weights, lam)
    torch.testing.assert_close(smooth.sum(dim=-1), torch.ones(3, dtype=torch.float64))
    order = weights.sort(dim=-1).indices
    assert (smooth.gather(-1, order).diff(dim=-1) >= 0).all()


@many
@given(seeds, st.integers(1, 50), lams, st.integers(1, 64))
def test_it_is_a_window_with_even_queries_added(
    seed: int, num_tokens: int, lam: float, window: int
) -> None:
    """The mean over `window` queries and `lam * window` that attend to all tokens alike."""
    weights = attention(seed, num_tokens)
    total = window * weights + lam * window * torch.full_like(weights, 1 / num_tokens)
    torch.testing.assert_close(smoothed(weights, lam), total / (window + lam * window))


@many
@given(seeds, st.integers(2, 50), st.sampled_from((1e-4, 1e-3, 1e-2)))
def test_eps_is_the_prior_at_one_strength(seed: int, num_tokens: int, eps: float) -> None:
    weights = attention(seed, num_tokens)
    norms = torch.rand(3, num_tokens, generator=torch.Generator().manual_seed(seed)).double()
    lam = eps * num_tokens
    by_eps = (weights + eps) * norms
    torch.testing.assert_close(smoothed(weights, lam) * norms * (1 + lam), by_eps)

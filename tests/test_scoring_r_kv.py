import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import Shape, few, random_layer, scoring_inputs, seeds, shapes
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring import r_kv
from vllm_kvselect.scoring.r_kv import importance, r_kv_scores, redundancy, similarities


@few
@given(
    shape=shapes(max_tokens=48),
    seed=seeds,
    with_sinks=st.booleans(),
    lam=st.sampled_from([0.0, 0.1, 1.0]),
    threshold=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_scores_equal_the_oracle(
    shape: Shape, seed: int, with_sinks: bool, lam: float, threshold: float
) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    config = EvictionConfig(method="adakv-perturb", r_kv_lam=lam, r_kv_threshold=threshold)
    inputs = scoring_inputs(layer.query, layer.key, shape.scale, sinks=layer.sinks)
    expected = oracle.r_kv_scores(
        layer.query.tolist(),
        layer.key.tolist(),
        shape.scale,
        *(config.kernel_size, config.pooling, lam, threshold),
        None if layer.sinks is None else layer.sinks.tolist(),
    )
    scores = r_kv_scores(inputs, config)
    assert (scores >= 0).all()
    torch.testing.assert_close(
        scores, torch.tensor(expected, dtype=torch.float64), atol=1e-12, rtol=0
    )


def test_of_repeated_keys_the_latest_is_the_least_redundant() -> None:
    key = torch.eye(32)[None, torch.arange(24)]
    key[0, [3, 9, 15]] = key[0, 3].clone()
    inputs = scoring_inputs(key[0, :2, None], key)
    repeated = redundancy(similarities(inputs, threshold=0.5), inputs)[0]
    assert repeated[3] > repeated[9] > repeated[15] == repeated[4] == repeated[20]
    assert float(repeated.sum()) == pytest.approx(1)


def test_the_largest_logit_of_a_group_counts_before_the_softmax() -> None:
    key = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]])
    query = torch.tensor([[[5.0, 0.0], [0.0, 5.0]]])
    inputs = scoring_inputs(query, key, scale=1.0)
    weights = torch.softmax(torch.tensor([5.0, 5.0, 0.0, 0.0]), dim=0)
    found = importance(inputs, EvictionConfig(method="adakv-perturb", kernel_size=1))
    torch.testing.assert_close(found, weights[None, :3])


def test_blocks_of_keys_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = random_layer(Shape(2, 2, 8, 8, 3, 51, 2), 0)
    inputs = scoring_inputs(layer.query, layer.key)
    whole = similarities(inputs, 0.1)
    monkeypatch.setattr(r_kv, "block_elements", lambda _: 7 * whole.numel())
    torch.testing.assert_close(similarities(inputs, 0.1), whole, atol=1e-12, rtol=0)

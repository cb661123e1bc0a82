import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import Shape, few, random_layer, scoring_inputs, seeds, shapes, some
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring import h2o
from vllm_kvselect.scoring.h2o import accumulate, h2o_scores
from vllm_kvselect.scoring.inputs import ScoringInputs


@few
@given(shape=shapes(max_tokens=32), seed=seeds)
def test_scores_equal_the_oracle(shape: Shape, seed: int) -> None:
    layer = random_layer(shape, seed)
    config = EvictionConfig(method="adakv-perturb", window=shape.window)
    scores = h2o_scores(scoring_inputs(layer.prompt_query, layer.key, shape.scale), config)
    lists = layer.prompt_query.tolist(), layer.key.tolist()
    expected = oracle.h2o_scores(*lists, shape.scale, shape.window)
    reference = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(scores, reference, rtol=1e-12, atol=0)


@some
@given(
    data=st.data(),
    shape=shapes(max_tokens=48),
    seed=seeds,
    block=st.integers(1, 20_000),
    with_sinks=st.booleans(),
)
def test_chunks_add_up_whatever_their_sizes(
    data: st.DataObject, shape: Shape, seed: int, block: int, with_sinks: bool
) -> None:
    layer = random_layer(shape, seed, with_sinks=with_sinks)
    length = shape.num_prompt_tokens
    cuts = sorted(data.draw(st.sets(st.integers(1, length - 1), max_size=4)))
    total = torch.zeros(shape.num_kv_heads, length, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h2o, "block_elements", lambda _: block)
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            query = layer.prompt_query[start:stop]
            key = layer.key[:, :stop]
            total[:, :stop] += accumulate(
                scoring_inputs(query, key, shape.scale, sinks=layer.sinks)
            )
    whole = accumulate(
        scoring_inputs(layer.prompt_query, layer.key, shape.scale, sinks=layer.sinks)
    )
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    # Every query pays an attention of 1 in all, or less if a sink takes its share.
    paid = torch.full((shape.num_kv_heads,), length, dtype=torch.float64)
    if with_sinks:
        assert (whole.sum(dim=1) < paid).all()
    else:
        torch.testing.assert_close(whole.sum(dim=1), paid)


def test_memory_is_bounded_by_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    attention = h2o.window_attention

    def recorded(inputs: ScoringInputs) -> torch.Tensor:
        rows = attention(inputs)
        sizes.append(rows.numel())
        return rows

    monkeypatch.setattr(h2o, "window_attention", recorded)
    monkeypatch.setattr(h2o, "block_elements", lambda _: 2**14)
    layer = random_layer(Shape(2, 3, 8, 32, 4, 1028, 1), 0, torch.float32)
    accumulate(scoring_inputs(layer.prompt_query, layer.key))
    assert len(sizes) > 100
    assert max(sizes) <= 2**14


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_at_least_float32(dtype: torch.dtype) -> None:
    layer = random_layer(Shape(2, 2, 8, 8, 3, 51, 2), 0, dtype)
    assert accumulate(scoring_inputs(layer.prompt_query, layer.key)).dtype == torch.float32

"""The choice: what every head keeps, and among heads that hold different numbers of entries."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.method_cases import MethodCase
from tests.strategies import Layer, Shape, few
from tests.uneven import Uneven, every_round_case, numbers, retain_uneven, unevens
from vllm_kvselect.choice import Sizes, choose
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.selecting.ranking import Candidates


def run_oracle(case: MethodCase, uneven: Uneven) -> oracle.Retained:
    shape, config = uneven.shape, case.config(window=uneven.shape.window)
    packed = (shape.num_packed, shape.block_size)
    heads = [
        [alone(case, layer, shape, of_heads, head) for head in range(len(of_heads))]
        for layer, of_heads in zip(uneven.layers, uneven.num_absent, strict=True)
    ]
    lengths = (shape.num_tokens, shape.scale, *packed)
    return oracle.retain_uneven(heads, *lengths, config)


def alone(
    case: MethodCase, layer: Layer, shape: Shape, absent: list[int], head: int
) -> oracle.LayerInputs:
    """A head with the entries that it has."""
    num_absent = absent[head]
    queries = slice(head * shape.group, (head + 1) * shape.group)
    assert layer.sinks is not None
    return oracle.LayerInputs(
        layer.query[:, queries].tolist(),
        layer.key[head : head + 1, num_absent : shape.num_prompt_tokens].tolist(),
        layer.value[head : head + 1, num_absent : shape.num_tokens].tolist(),
        layer.output_projection[head : head + 1].tolist(),
        layer.sinks[queries].tolist(),
        numbers=numbers(layer, shape)[head : head + 1, num_absent:].tolist(),
    )


@every_round_case
@few
@given(data=st.data())
def test_heads_of_different_lengths_retain_what_the_oracle_says(
    case: MethodCase, data: st.DataObject
) -> None:
    uneven = data.draw(unevens(case))
    retention, expected = retain_uneven(case, uneven), run_oracle(case, uneven)
    num_tokens = uneven.shape.num_tokens
    assert retention.retained.tolist() == [h * num_tokens + t for h, t in expected.entries]
    assert retention.offsets.diff().tolist() == expected.pages
    # What is absent is never retained.
    absent = torch.tensor(uneven.num_absent).flatten()
    head, token = retention.retained // num_tokens, retention.retained % num_tokens
    assert (token >= absent[head]).all()


def test_a_head_that_wants_little_keeps_its_first_tokens() -> None:
    scores = torch.rand(3, 2, 64)
    scores[1] /= 1000  # these two would get less than half a page
    scores[..., :4] = torch.inf
    sizes, config = Sizes([2], 16), EvictionConfig(method="layer-probe")
    retention = choose(None, Candidates(scores), sizes, config)
    pages = retention.offsets[0].diff().tolist()
    assert sum(pages) == 12
    assert pages[2:4] == [1, 1]
    heads = [retention.retained[retention.retained // 64 == head] % 64 for head in range(6)]
    assert all({0, 1, 2, 3} <= {*tokens.tolist()} for tokens in heads)

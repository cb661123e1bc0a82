"""Which layers a drafter's follow, and what competes in them, against loops that say the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvselect.engine.drop.following import followed_layers, following_candidates
from vllm_kvselect.selecting.ranking import Candidates


@given(st.integers(1, 40), st.integers(0, 40))
def test_a_layer_follows_the_one_at_its_depth(num_choosing: int, num_following: int) -> None:
    followed = followed_layers(num_choosing, num_following)
    assert len(followed) == num_following
    for layer, index in enumerate(followed):
        # What is computed up to its end, as a part of all layers, is computed there and not before.
        depth = (layer + 1) / num_following
        assert index / num_choosing < depth <= (index + 1) / num_choosing + 1e-12
    if num_following == num_choosing:
        assert followed == [*range(num_choosing)]


@pytest.mark.parametrize("has_norms", [False, True])
def test_packed_entries_keep_their_scores_and_new_ones_have_those_of_the_followed(
    has_norms: bool,
) -> None:
    torch.manual_seed(0)
    num_layers, num_heads, num_packed, num_tokens = 3, 2, 6, 10
    followed = [0, 2]
    shape = num_layers, num_heads, num_tokens
    stacked = Candidates(torch.rand(shape), norms=torch.rand(shape) if has_norms else None)
    first = following_candidates(stacked, followed, None, None, 0)
    assert torch.equal(first.scores, stacked.scores[followed])
    absent = torch.tensor([[0, 4], [6, 2]])
    num_entries = int((num_packed - absent).sum())
    packed = Candidates(
        torch.rand(num_entries), norms=torch.rand(num_entries) if has_norms else None
    )
    found = following_candidates(stacked, followed, packed, absent, num_packed)
    assert found.num_absent is absent
    for part, numbers, theirs in zip(found[:3], packed[:3], stacked[:3], strict=True):
        if part is None:
            continue
        rest = iter(numbers.tolist())
        for layer, index in enumerate(followed):
            for head in range(num_heads):
                assert torch.equal(part[layer, head, num_packed:], theirs[index, head, num_packed:])
                for column in range(int(absent[layer, head]), num_packed):
                    assert part[layer, head, column] == pytest.approx(next(rest))
        assert next(rest, None) is None

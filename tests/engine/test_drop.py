"""Candidates kept for later: copies, of all layers, in one piece of memory."""

import pytest
import torch

from vllm_kvselect.engine.drop.drop import KeptCandidates
from vllm_kvselect.selecting.ranking import Candidates


def test_candidates_are_copied_into_one_piece_of_memory() -> None:
    layers = [Candidates(*torch.rand(3, 2, 5).unbind()) for _ in range(3)]
    kept = KeptCandidates(3)
    copies = [kept.keep(index, layer) for index, layer in enumerate(layers)]
    expected = Candidates.stack(layers)
    for layer in layers:
        layer.scores.zero_()
    for part, whole in zip(kept.stacked[:3], expected[:3], strict=True):
        assert torch.equal(part, whole)
    assert {copy.scores.untyped_storage().data_ptr() for copy in copies} == {
        kept.stacked.scores.data_ptr()
    }


def test_nothing_is_chosen_before_all_layers_are_kept() -> None:
    scores = torch.rand(2, 5)
    kept = KeptCandidates(2)
    kept.keep(0, Candidates(scores))
    with pytest.raises(AssertionError):
        _ = kept.stacked

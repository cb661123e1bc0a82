"""Queries that are kept for rounds."""

import pytest
import torch

from vllm_kvselect.engine.step.seen_queries import SeenQueries


@pytest.mark.parametrize("tokens", [slice(1, 3), torch.tensor([1, 2])])
def test_layers_are_kept_side_by_side(tokens: slice | torch.Tensor) -> None:
    layers = torch.arange(2 * 4 * 3 * 2, dtype=torch.float32).view(2, 4, 3, 2)
    seen = SeenQueries(tokens, 2)
    for index, query in enumerate(layers):
        seen.see(index, query)
        query.zero_()  # a runner writes the next step's into the same memory
    fresh = torch.arange(2 * 4 * 3 * 2, dtype=torch.float32).view(2, 4, 3, 2)
    for place, token in enumerate((1, 2)):
        assert torch.equal(seen.of_token(place), fresh[:, token])

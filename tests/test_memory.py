"""Queries of the latest tokens: kept in all layers, and found by position."""

import pytest
import torch

from vllm_kvselect.scoring.memory import LastQueries, StepQueries


def between(queries: LastQueries, begin: int, end: int) -> torch.Tensor:
    return torch.cat(queries.between(begin, end), dim=1)


def steps(*lens: int) -> list[tuple[StepQueries, torch.Tensor]]:
    """Queries of some steps, and what they are: each of its own position."""
    found, position = [], 0
    for length in lens:
        query = torch.arange(position, position + length, dtype=torch.float32)[:, None, None]
        seen = StepQueries(slice(None), 2)
        for index in range(2):
            seen.see(index, query + 100 * index)
        found.append((seen, query))
        position += length
    return found


@pytest.mark.parametrize("tokens", [slice(1, 3), torch.tensor([1, 2])])
def test_layers_are_kept_side_by_side(tokens: slice | torch.Tensor) -> None:
    layers = torch.arange(2 * 4 * 3 * 2, dtype=torch.float32).view(2, 4, 3, 2)
    seen = StepQueries(tokens, 2)
    for index, query in enumerate(layers):
        seen.see(index, query)
        query.zero_()  # a runner writes the next step's into the same memory
    fresh = torch.arange(2 * 4 * 3 * 2, dtype=torch.float32).view(2, 4, 3, 2)
    assert torch.equal(seen.all, fresh[:, [1, 2]])


def test_last_queries_are_found_by_position_across_steps() -> None:
    queries, position = LastQueries(), 0
    for seen, query in steps(5, 1, 1, 3):
        queries.keep(seen, 0, position, position + len(query))
        position += len(query)
    assert between(queries, 3, 9)[1].flatten().tolist() == [103, 104, 105, 106, 107, 108]
    assert between(queries, 4, 7).flatten().tolist() == [4, 5, 6, 104, 105, 106]
    queries.forget_before(6)
    assert between(queries, 6, 10)[0].flatten().tolist() == [6, 7, 8, 9]
    with pytest.raises(LookupError, match="tokens 5 to 10 were not kept"):
        between(queries, 5, 10)
    with pytest.raises(LookupError, match="tokens 10 to 11 were not kept"):
        between(queries, 8, 11)


def test_queries_of_rejected_drafts_give_way() -> None:
    queries = LastQueries()
    (first, _), (again, _) = steps(6, 6)
    queries.keep(first, 0, 0, 6)
    queries.keep(again, 0, 3, 5)  # positions 3 to 5 were of drafts
    assert between(queries, 1, 5)[0].flatten().tolist() == [1, 2, 6, 7]
    with pytest.raises(LookupError):
        between(queries, 1, 6)

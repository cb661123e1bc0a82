"""What a worker remembers between steps: of several requests whose cuts are made together."""

import torch

from tests.plans import planned
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.drop.request import Request
from vllm_kvselect.engine.drop.state import RetentionState

ONCE = EvictionConfig(method="adakv-perturb", budget=128)
TWICE = EvictionConfig(method="adakv-perturb", budget=128, decode_budget=128, decode_interval=32)


def test_cuts_of_several_requests_are_stored_and_completed_together() -> None:
    """Each has its own offsets and longest run, and none where no cut follows."""
    state = RetentionState(num_blocks=10, num_layers=2, num_kv_heads=2)
    requests = [Request(planned(300, 32, config, 200)) for config in (TWICE, ONCE, TWICE)]
    keys = torch.tensor([7, 2, 5])
    pages = torch.tensor([[[1, 3], [2, 2]], [[4, 0], [2, 2]], [[2, 2], [6, 2]]])
    offsets = torch.zeros(3, 2, 3, dtype=torch.int64)
    offsets[..., 1:] = pages.cumsum(-1)
    state.store(keys, offsets)
    assert torch.equal(state.offsets[keys], offsets.int())
    assert not state.offsets[[0, 1, 3, 4, 6, 8, 9]].any()
    state.complete([(request, request.plan.cuts[0]) for request in requests], keys)
    runs = [request.progress.longest_run for request in requests]
    assert [None if run is None else int(run) for run in runs] == [3, None, 6]
    assert [request.progress.num_made for request in requests] == [1, 1, 1]
    assert [made.request for made in state.completed] == requests

"""State is keyed by block: bounded, replaced when stale, never mistaken for another request's."""

import torch

from vllm_kvselect.engine.state import RetentionState

SHAPE = (2, 8, 4, 16)


def test_window_is_found_only_at_the_position_it_was_filled_to() -> None:
    state = RetentionState(num_blocks=10, num_layers=2, num_kv_heads=2, max_num_seqs=3)
    assert state.window(5, 0) is None
    state.open_window(5, SHAPE, torch.float32)
    window = state.window(5, 0)
    assert window is not None
    window.num_filled = 3
    assert state.window(5, 0) is None
    assert state.window(5, 3) is window
    state.close_window(5)
    assert state.window(5, 3) is None


def test_reopening_replaces_what_an_aborted_request_left() -> None:
    state = RetentionState(num_blocks=10, num_layers=2, num_kv_heads=2, max_num_seqs=3)
    state.open_window(5, SHAPE, torch.float32)
    stale = state.window(5, 0)
    state.open_window(5, SHAPE, torch.float32)
    assert state.window(5, 0) is not stale


def test_windows_of_aborted_requests_do_not_pile_up() -> None:
    state = RetentionState(num_blocks=10, num_layers=2, num_kv_heads=2, max_num_seqs=3)
    for block in range(10):
        state.open_window(block, SHAPE, torch.float32)
    assert [block for block in range(10) if state.window(block, 0)] == [7, 8, 9]

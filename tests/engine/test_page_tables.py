"""PageTables gives what a table built anew gives, and builds one only when it must."""

from unittest.mock import Mock

import pytest
import torch

from vllm_kvselect.engine.drop.state import RetentionState
from vllm_kvselect.engine.view import page_tables
from vllm_kvselect.engine.view.page_tables import PageTables, SettledRows

BLOCK_SIZE, NUM_LAYERS, NUM_KV_HEADS = 4, 2, 3
TAIL_START = 6
"""Blocks before the tail; the last two of them are packed."""


@pytest.fixture
def state() -> RetentionState:
    state = RetentionState(40, NUM_LAYERS, NUM_KV_HEADS)
    state.offsets[:] = torch.tensor([[0, 1, 4, 6], [6, 7, 10, 12]])
    return state


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Counts the tables that are built from nothing."""
    counted = Mock(wraps=page_tables.headwise_page_table)
    monkeypatch.setattr(page_tables, "headwise_page_table", counted)
    return counted


def settled(seq_lens: list[int], first_block: int = 1) -> SettledRows:
    """Rows with blocks counted up from `first_block`, 12 each."""
    num_rows = len(seq_lens)
    table = torch.arange(first_block, first_block + 12 * num_rows, dtype=torch.int32)
    table = table.view(num_rows, 12)
    first_packed = torch.full((num_rows,), TAIL_START - 2)
    return SettledRows(
        table,
        torch.tensor(seq_lens),
        first_packed,
        torch.full((num_rows,), TAIL_START),
        table[:, TAIL_START - 2].to(torch.int64),
    )


def assert_up_to_date(tables: PageTables, rows: SettledRows, state: RetentionState) -> None:
    expected = rows.page_table(state, BLOCK_SIZE)
    table = tables.of(rows)
    assert torch.equal(table.pages, expected.pages)
    assert torch.equal(table.seq_lens, expected.seq_lens)
    assert table.seq_lens.dtype == expected.seq_lens.dtype


def test_a_table_is_built_once_for_the_tokens_of_a_block(
    state: RetentionState, built: Mock
) -> None:
    tables = PageTables(state, BLOCK_SIZE)
    for step in range(1, 5):
        tables.of(settled([25 + step, 28 + step]))
    assert built.call_count == 1 + 1  # the first row's next block comes with step 4
    for step in range(9):
        assert_up_to_date(tables, settled([25 + step, 28 + step]), state)


def test_a_new_block_is_seen_though_the_row_had_its_id_before_it_was_the_request_s(
    state: RetentionState,
) -> None:
    tables = PageTables(state, BLOCK_SIZE)
    assert_up_to_date(tables, settled([28]), state)
    assert_up_to_date(tables, settled([29]), state)


def test_other_rows_other_blocks_and_other_plans_are_seen(state: RetentionState) -> None:
    tables = PageTables(state, BLOCK_SIZE)
    changed = settled([26, 30])
    changed.tail_start[1], changed.first_packed[1] = 5, 3
    changed.first_packed_blocks[1] = changed.block_table[1, 3]
    for rows in (settled([26]), settled([26, 30]), settled([26, 30], 3), changed):
        assert_up_to_date(tables, rows, state)


def test_prompts_packed_into_the_same_blocks_are_seen(state: RetentionState) -> None:
    tables = PageTables(state, BLOCK_SIZE)
    rows = settled([26])
    assert_up_to_date(tables, rows, state)
    offsets = torch.tensor([[[0, 2, 3, 6], [6, 8, 9, 12]]])
    state.store(rows.first_packed_blocks, offsets)
    assert_up_to_date(tables, settled([26]), state)

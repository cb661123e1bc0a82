"""Sums that move with their entries: laid out in columns, cut, and laid out again."""

import torch

from vllm_kvselect.engine.step.received import Received

NUM_TAIL = 3
LENGTHS = torch.tensor([[2, 4], [6, 0]])
"""Packed entries of two heads in two layers."""


def columns(lengths: torch.Tensor, num_tail: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """A number for each entry, all heads ending together; columns before the tail; absent ones."""
    num_packed = int(lengths.max())
    num_absent = num_packed - lengths
    sums = torch.arange(1.0, 4 * (num_packed + num_tail) + 1).view(2, 2, -1)
    sums[torch.arange(num_packed + num_tail) < num_absent[..., None]] = 0
    return sums, num_packed, num_absent


def test_columns_come_back_with_zeros_for_later_entries() -> None:
    sums, num_packed, num_absent = columns(LENGTHS, NUM_TAIL)
    before = Received(90, torch.zeros(int(LENGTHS.sum())), sums[..., :0])
    received = before.after_more(100, sums, num_packed, num_absent)
    assert received.position == 100
    assert received.packed.tolist() == [
        number for row in sums[..., :num_packed].flatten(0, 1) for number in row if number
    ]
    later = received.in_columns(num_packed + NUM_TAIL + 2, num_packed, num_absent)
    assert torch.equal(later, torch.nn.functional.pad(sums, (0, 2)))


def test_a_cut_keeps_the_sums_of_what_it_retains_in_the_order_of_their_slots() -> None:
    sums, num_competing, _ = columns(LENGTHS, NUM_TAIL)
    retained = torch.tensor([4, 5, 9, 12, 13, 14])  # heads 0, 1, and 2
    received = Received.after_cut(100, sums, num_competing, retained)
    flat = [sums[index // 12, index // 6 % 2, index % 6] for index in retained.tolist()]
    assert received.packed.tolist() == flat
    assert torch.equal(received.tail, sums[..., num_competing:])
    # Then heads have 2, 1, 3 and no packed entries.
    lengths = torch.tensor([[2, 1], [3, 0]])
    again = received.in_columns(3 + NUM_TAIL + 1, 3, 3 - lengths)
    assert again[0, 0].tolist() == [0, *flat[:2], *sums[0, 0, -NUM_TAIL:].tolist(), 0]
    assert again[0, 1].tolist() == [0, 0, flat[2], *sums[0, 1, -NUM_TAIL:].tolist(), 0]
    assert again[1, 0].tolist() == [*flat[3:], *sums[1, 0, -NUM_TAIL:].tolist(), 0]
    assert again[1, 1].tolist() == [0, 0, 0, *sums[1, 1, -NUM_TAIL:].tolist(), 0]


def test_a_prompt_of_which_nothing_is_dropped_has_a_tail_only() -> None:
    sums = torch.rand(2, 2, 7)
    received = Received.of_prompt(sums)
    assert received.position == 7
    nothing = torch.zeros(2, 2, dtype=torch.int64)
    assert torch.equal(received.in_columns(9, 0, nothing)[..., :7], sums)
    assert torch.equal(received.after_more(9, sums, 0, nothing).tail, sums)

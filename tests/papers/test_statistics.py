import torch
from papers.statistics import interval_text, rounded, share_interval, share_lower


def test_share_counts_heads_of_the_mean_over_texts() -> None:
    one = torch.tensor([[1.0, 1.0, 5.0, 1.0], [1.0, 3.0, 1.0, 1.0]])
    other = torch.tensor([[0.5, 2.0, 1.0, 1.0], [0.5, 3.0, 4.0, 1.0]])
    assert share_lower(one, other) == 0.5  # the first and the third; equal is not lower


def test_interval_holds_the_share_and_is_the_same_every_time() -> None:
    generator = torch.Generator().manual_seed(0)
    one = torch.rand(8, 50, generator=generator)
    other = one + 0.2 * torch.randn(8, 50, generator=generator) - 0.05
    low, high = share_interval(one, other)
    assert low < share_lower(one, other) < high
    assert (low, high) == share_interval(one, other)


def test_certain_share_has_a_narrow_interval() -> None:
    one = torch.ones(3, 10)
    assert share_interval(one, one - 0.5) == (1.0, 1.0)


def test_one_text_gives_no_interval() -> None:
    one = torch.ones(1, 10)
    assert share_interval(one, one - 0.5) is None
    assert interval_text(None) == ""


def test_cells_show_intervals() -> None:
    assert interval_text((0.25, 0.5)) == "25% to 50%"


def test_rounded_keeps_five_digits() -> None:
    assert rounded(torch.tensor([[1.23456789, 0.0], [12345678.0, -1e-9]], dtype=torch.float64)) == [
        [1.2346, 0.0],
        [12346000.0, -1e-9],
    ]

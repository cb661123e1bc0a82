from fractions import Fraction
from math import ceil

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import (
    Cut,
    Cuts,
    budget_entries,
    budget_problem,
    chunk_end,
    cuts,
    most_blocks,
)

many = settings(max_examples=300, deadline=None, derandomize=True)

prompt_lens = st.integers(1, 3000)
block_sizes = st.sampled_from((1, 4, 16, 32, 128))
windows = st.integers(1, 100)
budgets = st.one_of(st.integers(1, 3500), st.floats(0.001, 1.0))


def make(budget: int | float, window: int) -> EvictionConfig:
    return EvictionConfig.parse({"method": "adakv-perturb", "budget": budget, "window": window})


@many
@given(prompt_lens, block_sizes, budgets, windows)
def test_the_prompts_cut_packs_the_fewest_blocks_that_meet_the_budget_and_frees_the_others(
    prompt_len: int, block_size: int, budget: int | float, window: int
) -> None:
    """Found by search; the tail begins with the last block before which no token is the window's.

    One packed block is the least there is, and without a block to free there is no cut.
    """
    config = make(budget, window)
    ends = range(0, prompt_len - window + 1, block_size)
    tail_start = len(ends) - 1
    packed = 1
    while packed * block_size + prompt_len - tail_start * block_size < budget_entries(
        prompt_len, config
    ):
        packed += 1
    expected = Cut(prompt_len, tail_start - packed, packed, tail_start)
    assert cuts(prompt_len, block_size, config) == ((expected,) if packed < tail_start else ())


@given(prompt_lens, block_sizes, budgets)
def test_disabled_eviction_makes_no_cut_and_no_rounds(
    prompt_len: int, block_size: int, budget: int | float
) -> None:
    config = EvictionConfig.parse({"method": "none", "budget": budget, "decode_budget": 512})
    assert not cuts(prompt_len, block_size, config, 1000)


@st.composite
def several_cuts(draw: st.DrawFn) -> Cuts:
    """None to four cuts of a request, in blocks of 4 tokens: each is later and frees more."""
    tail_start, first_packed, made = 0, 0, []
    for _ in range(draw(st.integers(0, 4))):
        first_packed += draw(st.integers(1, 4))
        tail_start = max(tail_start, first_packed) + draw(st.integers(1, 4))
        position = 4 * tail_start + draw(st.integers(0, 3))
        made.append(Cut(position, first_packed, tail_start - first_packed, tail_start))
    return Cuts(made)


@many
@given(several_cuts(), st.integers(0, 150))
def test_the_next_and_the_last_cut_enclose_a_length(planned: Cuts, num_tokens: int) -> None:
    is_made = [cut.position <= num_tokens for cut in planned]
    num_made = sum(is_made)
    assert is_made == [True] * num_made + [False] * (len(planned) - num_made)
    cut = planned.last_made(num_tokens)
    assert cut == (planned[num_made - 1] if num_made else None)
    assert planned.next_after(num_tokens) == (planned[num_made] if not all(is_made) else None)
    assert planned.num_freed(num_tokens) == (cut.num_freed if cut else 0)
    assert all(each.position >= planned.first_position for each in planned)


@many
@given(prompt_lens, block_sizes, budgets, windows)
def test_a_hit_leaves_a_block_and_the_window_to_be_computed(
    prompt_len: int, block_size: int, budget: int | float, window: int
) -> None:
    for planned in filter(None, [cuts(prompt_len, block_size, make(budget, window))]):
        position = planned[0].position
        fits = [
            num_blocks * block_size
            for num_blocks in range(position)
            if num_blocks * block_size <= position - window
            and (num_blocks + 1) * block_size <= position
        ]
        assert planned.most_found(block_size, window) == max(fits, default=0)


@many
@given(prompt_lens, st.floats(0.001, 1.0))
def test_fraction_is_rounded_up(prompt_len: int, fraction: float) -> None:
    entries = budget_entries(prompt_len, make(fraction, 32))
    exact = Fraction(fraction) * prompt_len
    # The product is rounded to binary, so it may end on either side of a whole number.
    assert exact - Fraction(1, 10**6) <= entries < exact + 1 + Fraction(1, 10**6)


@many
@given(prompt_lens, block_sizes, budgets, windows, st.integers(1, 3500))
def test_a_context_is_cut_at_its_last_block_border_as_if_the_prompt_ended_there(
    prompt_len: int, block_size: int, budget: int | float, window: int, context: int
) -> None:
    config = make(budget, window)
    border = min(context, prompt_len - 1) // block_size * block_size
    marked = config.model_copy(update={"context": context})
    expected = cuts(border, block_size, config) if border else Cuts()
    assert cuts(prompt_len, block_size, marked) == expected
    for cut in expected:
        assert cut.position == border < prompt_len


@many
@given(
    prompt_lens,
    st.integers(0, 1500),
    st.sampled_from((4, 16, 32)),
    st.integers(1, 32),
    st.integers(0, 300),
    st.integers(32, 200),
)
def test_rounds_bring_a_request_back_to_its_budget(
    prompt_len: int, max_tokens: int, block_size: int, window: int, more: int, interval: int
) -> None:
    budget = window + block_size + more
    values = {"method": "adakv", "budget": 1.0, "window": window, "decode_interval": interval}
    rounds = cuts(
        prompt_len, block_size, EvictionConfig(**values, decode_budget=budget), max_tokens
    )
    num_freed = 0
    for cut in rounds:
        # Counted from the prompt's end, and before the last token is generated.
        assert (cut.position - prompt_len) % interval == 0
        assert prompt_len < cut.position < prompt_len + max_tokens
        # More is freed each time; the budget is met in whole blocks.
        assert cut.first_packed > num_freed
        num_freed = cut.first_packed
        held = cut.position - num_freed * block_size
        least = cut.position - cut.tail_start * block_size + block_size  # the tail and one page
        assert budget <= held < max(budget, least) + block_size
        assert cut.position - cut.tail_start * block_size >= window
    for length in range(prompt_len, prompt_len + max_tokens):
        # Between rounds a request grows by the interval, and never further.
        held = length - rounds.num_freed(length) * block_size
        assert held <= max(budget + 2 * block_size, prompt_len) + interval


def test_the_prompts_cut_and_rounds_follow_one_another() -> None:
    config = EvictionConfig(
        method="adakv-perturb", budget=256, decode_budget=512, decode_interval=128
    )
    planned = cuts(1500, 32, config, 1000)
    assert planned[0] == cuts(1500, 32, config.model_copy(update={"decode_budget": 0}))[0]
    # The request may grow to the larger budget before the first round.
    assert [cut.position for cut in planned] == [1500, *range(1500 + 3 * 128, 2500, 128)]
    assert [planned.num_freed(length) for length in (1499, 1500, 1883, 1884)] == [0, 38, 38, 42]
    assert cuts(1500, 32, config) == planned[:1]


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"decode_budget": 63}, "decode_budget = 63 is too small: at least 64"),
        ({"decode_budget": 64, "decode_interval": 31}, "decode_interval = 31 is too short"),
        ({"decode_budget": 64, "decode_interval": 32}, None),
        ({"decode_interval": 1}, None),
        (
            {"budget": 256, "window": 48, "prompt_interval": 40},
            "prompt_interval = 40 is too short: at least 48 are needed",
        ),
        ({"decode_budget": 95, "keep_first": 33}, "decode_budget = 95 is too small: at least 96"),
        ({"decode_budget": 96, "keep_first": 33}, None),
        ({"budget": 0.045, "keep_first": 33}, "budget = 0.045 retains 93 entries of 2048 tokens"),
    ],
)
def test_rounds_have_room_for_a_window_and_a_block(
    values: dict[str, int], problem: str | None
) -> None:
    found = budget_problem(2048, 32, EvictionConfig(method="adakv", **values))
    assert (found or "").startswith(problem or "")
    assert (found is None) == (problem is None)


@st.composite
def bounded(draw: st.DrawFn) -> tuple[EvictionConfig, int]:
    """A configuration that bounds prompts and answers, and a block size."""
    block_size, window = draw(st.sampled_from((4, 8, 16, 32))), draw(st.integers(1, 20))
    shortest = max(block_size, window)
    values = {
        "method": "keydiff",
        "budget": draw(st.one_of(st.integers(window + block_size, 200), st.floats(0.2, 0.5))),
        "window": window,
        "prompt_interval": draw(st.integers(shortest, 120)),
        "least": draw(st.sampled_from((0, 50, 1024))),
        "decode_budget": draw(st.integers(window + block_size, 200)),
        "decode_interval": draw(st.integers(shortest, 120)),
        "keep_first": draw(st.sampled_from((None, 1, 50))),
    }
    config = EvictionConfig.parse(values)
    assume(budget_problem(900, block_size, config) is None)
    return config, block_size


@many
@given(bounded(), st.integers(1, 900))
def test_a_prompt_is_cut_at_multiples_of_its_interval_and_at_its_end(
    case: tuple[EvictionConfig, int], prompt_len: int
) -> None:
    config, block_size = case
    planned = cuts(prompt_len, block_size, config)
    step = ceil(config.prompt_interval / block_size) * block_size
    for before, cut in zip([None, *planned], planned, strict=False):
        num_retained = cut.position - cut.first_packed * block_size
        if cut.position < prompt_len:
            # The budget of what was seen before the latest interval, and that interval.
            assert cut.position % step == 0
            entries = budget_entries(cut.position, config)
            if isinstance(config.budget, float):
                entries = max(entries, config.least)
            # The first tokens have whole pages, however little is seen.
            of_tail = cut.position - cut.tail_start * block_size
            of_first = ceil((config.keep_first or 0) / block_size) * block_size
            wanted = max(entries + step, of_first + of_tail)
            assert wanted <= num_retained < wanted + block_size
            assert cut.tail_start == (cut.position - step) // block_size
            # What follows it does not matter.
            assert cut in cuts(900, block_size, config)
        if before is not None and isinstance(config.budget, int):
            # A fraction grows with what is seen: a cut may free nothing more.
            assert cut.position - before.position <= max(step, config.decode_interval)
    # Without cuts in it, it ends with the same.
    at_end = cuts(prompt_len, block_size, config.model_copy(update={"prompt_interval": 0}))
    assert planned.num_freed(prompt_len) >= at_end.num_freed(prompt_len)
    last = planned.last_made(prompt_len)
    if last is not None and last.position == prompt_len:
        assert last == at_end[0]


@many
@given(bounded(), st.integers(1, 900), st.integers(0, 5))
def test_no_request_holds_more_than_the_most(
    case: tuple[EvictionConfig, int], prompt_len: int, num_ahead: int
) -> None:
    config, block_size = case
    planned = cuts(prompt_len, block_size, config, 900 - prompt_len)
    # What is held when each token comes, if blocks are taken for `num_ahead` tokens more than are
    # computed.
    held = []
    for num_tokens in range(1, 901):
        num_made = planned.num_made(num_tokens - 1)
        freed = planned[num_made - 1].first_packed if num_made else 0
        held.append(ceil(min(900, num_tokens + num_ahead) / block_size) - freed)
    assert planned.most_held(900, block_size, num_ahead) == max(held)
    assert max(held) <= most_blocks(900, block_size, config, num_ahead)
    unbounded = config.model_copy(update={"decode_budget": 0})
    assert most_blocks(900, block_size, unbounded) == ceil(900 / block_size)


@many
@given(bounded(), st.integers(1, 900), st.integers(2, 17))
def test_pages_smaller_than_blocks_keep_a_page_too_many_at_most_and_free_whole_blocks(
    case: tuple[EvictionConfig, int], prompt_len: int, per_block: int
) -> None:
    config, page_size = case
    block_size = page_size * per_block
    whole = ceil(config.prompt_interval / block_size) * block_size
    config = config.model_copy(update={"prompt_interval": whole})
    planned = cuts(prompt_len, block_size, config, 900 - prompt_len, page_size)
    by_page = {cut.position: cut for cut in cuts(prompt_len, page_size, config, 900 - prompt_len)}
    for before, cut in zip([None, *planned], planned, strict=False):
        # Entries are those of blocks as small as a page; what is freed is whole.
        # One that frees no page more is no cut by itself.
        other = by_page.get(cut.position, cut)
        assert (cut.num_packed, cut.tail_start) == (other.num_packed, other.tail_start)
        # They are packed in whole blocks, the last ones that have nothing of the tail.
        packed_end = cut.first_packed + cut.num_packed
        assert packed_end % per_block == 0
        assert cut.tail_start - per_block < packed_end <= cut.tail_start
        assert cut.num_freed == cut.first_packed // per_block > (before.num_freed if before else 0)
        assert cut.num_freed < cut.first_of_tail == cut.tail_start // per_block
    # No cut is left out that would free a block.
    for position, cut in by_page.items():
        end = cut.tail_start // per_block * per_block
        assert planned.num_freed(position) >= (end - cut.num_packed) // per_block
    assert planned.most_held(900, block_size) <= most_blocks(900, block_size, config)


def test_a_block_of_many_pages_keeps_the_budget_of_a_page() -> None:
    config = EvictionConfig(method="adakv-perturb", budget=256)
    (cut,) = cuts(1500, 544, config, page_size=32)
    assert (cut.first_packed, cut.num_packed, cut.tail_start, cut.num_freed) == (27, 7, 45, 1)
    assert cuts(1500, 32, config)[0].num_packed == 7
    # A block that is one page packs a whole one of its own.
    assert cuts(1500, 544, config)[0].num_packed == 1
    assert not cuts(600, 544, config, page_size=32)


CUT = Cut(1000, 10, 5, 60)


@many
@given(
    window=st.integers(1, 60),
    in_graph=st.integers(1, 9),
    rooms=st.lists(st.integers(1, 400), min_size=1, max_size=30),
    begin=st.integers(0, 900),
)
def test_no_chunk_with_tokens_of_the_window_fits_a_graph(
    window: int, in_graph: int, rooms: list[int], begin: int
) -> None:
    """Whatever room steps have, and with room for twice as many and one more a chunk goes on."""
    enough = 2 * in_graph + 1
    for room in (*rooms, *[enough] * 1000):
        end = chunk_end(begin, begin + room, CUT, window, in_graph)
        assert begin <= end <= min(begin + room, CUT.position)
        assert end > begin or room < enough
        if end > max(begin, CUT.position - window):
            assert end - begin > in_graph
        begin = end
        if begin == CUT.position:
            return
    raise AssertionError("the cut is not reached")


def test_without_graphs_a_chunk_ends_at_the_cut_alone() -> None:
    assert chunk_end(900, 980, CUT, 32) == 980
    assert chunk_end(998, 999, CUT, 32) == 999
    assert chunk_end(900, 1200, CUT, 32) == 1000

"""Block accounting in vLLM's real KV cache manager, step by step, on plain integers."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager
from vllm_kvselect.engine.scheduler.integrity import find_violations
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec, WindowSpec
from vllm_kvselect.planning import plan as plan_module
from vllm_kvselect.planning.cuts import cuts

BLOCK_SIZE, NUM_BLOCKS = 16, 64
EVICTION = EvictionConfig(method="adakv-perturb", budget=64, window=8)


class Cache:
    """vLLM's cache manager with our spec, and the requests in it."""

    def __init__(self, eviction: EvictionConfig = EVICTION, window: int | None = None) -> None:
        load_general_plugins()
        init_none_hash(sha256)
        shape: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}
        shape |= {"block_size": BLOCK_SIZE, "eviction": eviction}
        groups = [KVCacheGroupSpec(["layer"], HeadwiseSpec(**shape))]
        if window is not None:
            groups.append(KVCacheGroupSpec(["window"], WindowSpec(**shape, sliding_window=window)))
        config = KVCacheConfig(NUM_BLOCKS, [], groups)
        self.kv = KVCacheManager(config, 4096, BLOCK_SIZE, BLOCK_SIZE, enable_caching=True)
        self.manager, *windows = self.kv.coordinator.single_type_managers
        self.managers = [self.manager, *windows]

    def request(
        self, name: str, prompt: list[int], max_tokens: int = 99, **extra_args: Any
    ) -> Request:
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        params = SamplingParams(max_tokens=max_tokens, extra_args=extra_args or None)
        return Request(name, prompt, params, None, block_hasher=hasher)

    def schedule(self, request: Request, num_tokens: int) -> int:
        """Schedules tokens as the scheduler does; returns how many the prefix cache gave."""
        num_hit = 0
        blocks = None
        if request.num_computed_tokens == 0:
            blocks, num_hit, _ = self.kv.get_computed_blocks(request)
        new = min(num_tokens, request.num_tokens - num_hit - request.num_computed_tokens)
        assert self.kv.allocate_slots(request, new, num_hit, blocks) is not None
        request.num_computed_tokens += num_hit + new
        self.check()
        return num_hit

    def decode(self, request: Request, num_steps: int) -> None:
        for step in range(num_steps):
            request.append_output_token_ids(1000 + step)
            self.schedule(request, 1)

    def table(self, request: Request) -> list[int]:
        ids, *_ = self.kv.get_block_ids(request.request_id)
        return ids

    @property
    def num_free(self) -> int:
        return self.kv.block_pool.get_num_free_blocks()

    @property
    def num_named(self) -> int:
        """Blocks that are found by a hash."""
        return sum(block.block_hash is not None for block in self.kv.block_pool.blocks)

    def check(self) -> None:
        """Free, held and null blocks are the pool; nobody shares a block that is not hashed."""
        pool, held = self.kv.block_pool, []
        tables = [t for m in self.managers for t in m.req_to_blocks.values()]
        for blocks in tables:
            held += [block for block in blocks if not block.is_null]
        assert len({block.block_id for block in held}) + self.num_free + 1 == NUM_BLOCKS
        for block in held:
            owners = sum(other is block for other in held)
            assert block.ref_cnt == owners
            assert owners == 1 or block.block_hash is not None
        assert pool.null_block.is_null


def test_our_manager_serves_our_spec_and_vllm_its_own() -> None:
    cache = Cache()
    assert type(cache.manager) is HeadwiseManager
    merged = HeadwiseSpec.merge([cache.manager.kv_cache_spec] * 3)
    assert merged == cache.manager.kv_cache_spec
    assert isinstance(merged, FullAttentionSpec)


@pytest.mark.parametrize("length", [200, 207, 208, 209, 215, 216, 217, 223, 224, 225])
@pytest.mark.parametrize("chunk", [7, 64, 1000])
def test_blocks_are_freed_in_the_step_after_the_prompt(length: int, chunk: int) -> None:
    cache = Cache()
    request = cache.request("a", list(range(length)))
    while request.num_computed_tokens < length:
        cache.schedule(request, chunk)
        assert 0 not in cache.table(request)
    before, (cut,) = cache.table(request), cuts(length, BLOCK_SIZE, EVICTION)
    cache.manager.take_swaps()
    cache.decode(request, 1)
    first_packed, tail_start = cut.first_packed, cut.tail_start
    after, swap = cache.table(request), cache.manager.take_swaps()["a"]
    assert swap.given_back == before[: -(-length // BLOCK_SIZE)]
    assert after[:first_packed] == [0] * first_packed
    assert after[first_packed:tail_start] == swap.fresh
    assert after[tail_start : len(before)] == before[tail_start:]
    # Blocks that were never used come first: none of its own is reused.
    assert not {*swap.fresh} & {*before}
    cache.decode(request, 40)
    assert not cache.manager.take_swaps()
    assert cache.num_free == NUM_BLOCKS - 1 - (-(-(length + 41) // BLOCK_SIZE) - first_packed)
    cache.kv.free(request)
    cache.check()
    assert cache.num_free == NUM_BLOCKS - 1


def test_a_cut_needs_no_block_beyond_those_that_it_gives_back() -> None:
    """In an empty pool it packs into its own blocks, which lose their names."""
    cache = Cache()
    request = cache.request("a", list(range(300)))
    cache.schedule(request, 300)
    before, pool = cache.table(request), cache.kv.block_pool
    taken = pool.get_new_blocks(cache.num_free)
    request.append_output_token_ids(7)
    assert cache.kv.allocate_slots(request, 1) is not None
    swap = cache.manager.take_swaps()["a"]
    assert {*swap.fresh} <= {*before}
    assert all(pool.blocks[number].block_hash is None for number in swap.fresh)
    pool.free_blocks(taken)


def test_every_request_is_planned_with_its_own_settings() -> None:
    cache = Cache(
        EvictionConfig(
            method="adakv-perturb", budget=64, window=8, allow_override=("method", "budget")
        )
    )
    settings: list[dict[str, Any]] = [
        {},
        {"kv_eviction_budget": 128},
        {"kv_eviction": "snapkv", "kv_eviction_budget": 0.5},
        {"kv_eviction": "none"},
        {"kv_eviction": "pyramidkv"},
    ]
    budgets = [64, 128, 0.5, None, 64]
    for number, (extra_args, budget) in enumerate(zip(settings, budgets, strict=True)):
        prompt = list(range(1000 * number, 1000 * number + 300))
        request = cache.request(f"r{number}", prompt, **extra_args)
        cache.schedule(request, 300)
        cache.decode(request, 20)
        own = budget and cuts(
            300, BLOCK_SIZE, EvictionConfig(method="adakv-perturb", budget=budget, window=8)
        )
        num_freed = own.num_freed(300) if own else 0
        assert cache.table(request).count(0) == num_freed
        blocks = cache.manager.req_to_blocks[request.request_id]
        hashed = [block.block_hash is not None for block in blocks[: 320 // BLOCK_SIZE]]
        if own:
            assert not any(hashed[own[0].first_packed : own[0].tail_start] + hashed[18:])
            assert all(hashed[own[0].tail_start : 18])
        else:
            assert all(hashed)
        again = cache.request(f"again{number}", prompt, **extra_args)
        assert cache.schedule(again, 300) == (own.most_found(BLOCK_SIZE, 8) if own else 288)
        cache.kv.free(again)
        cache.kv.free(request)
        cache.check()
    assert cache.num_free == NUM_BLOCKS - 1
    assert not cache.manager._planned


def test_a_request_is_planned_once_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, planned = Cache(), list[Any]()

    def count(server: EvictionConfig, params: SamplingParams) -> EvictionConfig:
        planned.append(params.extra_args)
        return server

    monkeypatch.setattr(plan_module, "planned_config", count)
    request = cache.request("a", list(range(300)), other="somebody else's")
    for num_tokens in (100, 100, 100):
        cache.schedule(request, num_tokens)
    cache.decode(request, 20)
    assert cache.table(request).count(0) > 0
    assert planned == [{"other": "somebody else's"}]
    cache.kv.free(request)
    request.num_computed_tokens = 0
    cache.schedule(request, 1000)
    assert len(planned) == 2


@pytest.mark.parametrize("method", ["keydiff", "adakv", "none"])
def test_who_keeps_everything_finds_after_others_as_much_as_in_stock(method: str) -> None:
    cache = Cache(EvictionConfig(method=method, budget=64, window=8, allow_override=("method",)))
    request = cache.request("a", list(range(300)))
    cache.schedule(request, 300)
    cache.decode(request, 30)
    cache.kv.free(request)
    again = cache.request("b", list(range(300)), kv_eviction="none")
    assert cache.schedule(again, 300) == 288


@pytest.mark.parametrize("settings", [{}, {"kv_eviction": "none"}], ids=["cut", "stock"])
def test_nobody_finds_what_a_request_preempted_in_its_step_never_computed(
    settings: dict[str, str],
) -> None:
    cache = Cache(EVICTION.model_copy(update={"allow_override": ("method",)}), window=32)
    request = cache.request("a", list(range(300)), **settings)
    cache.kv.new_step_starts()
    cache.schedule(request, 160)
    cache.kv.take_new_block_ids()
    windows = cache.managers[1].req_to_blocks["a"]
    before = cache.num_named
    cache.kv.new_step_starts()
    cache.schedule(request, 140)
    assert windows[0].is_null
    assert any(block.block_hash is not None for block in windows[-2:])
    cache.kv.free(request)
    assert cache.num_named == before > 0


def test_a_hash_past_the_first_cut_of_layers_beside_is_found() -> None:
    cache = Cache(window=32)
    request = cache.request("a", list(range(300)))
    cache.schedule(request, 300)
    cache.decode(request, 30)
    assert find_violations(cache.kv, {"a": request}) == []
    block = cache.managers[1].req_to_blocks["a"][-2]
    name = make_block_hash_with_group_id(request.block_hashes[0], 1)
    block.set_block_hash(name, num_tokens=BLOCK_SIZE)
    cache.kv.block_pool.cached_block_hash_to_block.insert(name, block)
    (violation,) = find_violations(cache.kv, {"a": request})
    assert (violation.invariant, violation.block_ids) == ("beside", (block.block_id,))


def test_a_request_for_one_token_drops_nothing_and_leaves_its_whole_prompt_in_the_cache() -> None:
    cache = Cache()
    first = cache.request("a", list(range(300)), max_tokens=1)
    assert cache.schedule(first, 300) == 0
    cache.decode(first, 1)
    assert 0 not in cache.table(first)
    cache.kv.free(first)
    # A step of a beam search: the prompt of the step before and one token more.
    step = cache.request("b", [*range(300), 7], max_tokens=1)
    assert cache.schedule(step, 301) == 288

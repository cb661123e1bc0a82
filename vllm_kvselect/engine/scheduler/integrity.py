"""Integrity of a live KV cache: what must hold between any two steps, and what does not.

`find_violations` looks at vLLM's own block pool and block tables. `checked_scheduler.py` runs it in
a live server, the state machine of `tests/engine/machine.py` after each of its steps.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_kvselect.engine.scheduler.block_manager import (
    HeadwiseManager,
    PlannedManager,
    headwise_manager,
)
from vllm_kvselect.paging.compaction import run_pages
from vllm_kvselect.paging.page_table import headwise_page_table
from vllm_kvselect.planning.cuts import Cut, Cuts

INVARIANTS = {
    "pool": "every block is either free, held or the null block, and the pool counts its free ones",
    "references": "a block is referenced as often as block tables name it",
    "owners": "only unfinished requests and loads hold blocks",
    "shared": "a block in two block tables is hashed, is of the same layers and has the same place "
    "in both",
    "hashes": "a hashed block is found by its hash, and no other block is",
    "covered": "a block table covers the tokens computed so far",
    "freed": "only the blocks before the packed ones are freed, all of them, when a cut is made",
    "bounded": "a request holds no more blocks than its plan says that it ever does",
    "named": "packed blocks and those computed after a cut have no name, or that of a compressed "
    "context and are complete",
    "loads": "blocks that wait for a stored context have no name under which it is found",
    "beside": "blocks of layers that drop nothing are not hashed from the first cut on",
    "plan": "scheduler and workers make the same plan of a request",
    "written": "a request computes nothing into a block of its own that had a name before",
    "pages": "each page that a worker reads lies in a block of the request that reads it",
}
"""What holds after every scheduling step, by the name under which a violation is reported."""


@dataclass(frozen=True)
class Violation:
    """An invariant, a key of `INVARIANTS`, that does not hold.

    It names the blocks concerned, and the requests that hold them, if any.
    """

    invariant: str
    detail: str
    block_ids: tuple[int, ...] = ()
    request_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        blocks = ", ".join(map(str, self.block_ids)) or "none"
        requests = ", ".join(self.request_ids) or "none"
        return (
            f"{self.invariant}: {self.detail} (blocks: {blocks}; requests: {requests}); "
            f"expected: {INVARIANTS[self.invariant]}"
        )


@dataclass(frozen=True)
class _Table:
    """A request's block table as the scheduler holds it."""

    request: Request
    blocks: list[KVCacheBlock]
    cuts: Cuts

    @property
    def made(self) -> Cut | None:
        """The last cut that is made: in the step that computes the first token after it."""
        return self.cuts.last_made(self.request.num_computed_tokens - 1)


def find_violations(kv: KVCacheManager, requests: Mapping[str, Request]) -> list[Violation]:
    """Checks a KV cache manager: the group of layers that drops entries, and those beside it.

    Valid between scheduling steps: right after `schedule()` and at any time until the next one. Its
    time grows with the number of blocks in the pool.
    """
    manager, managers = headwise_manager(kv), kv.coordinator.single_type_managers
    owners = block_owners(kv)
    tables = [
        _Table(request, blocks, manager.plan_of(request).cuts)
        for request_id, blocks in manager.req_to_blocks.items()
        if (request := requests.get(request_id)) is not None and not request.is_finished()
    ]
    found = [
        *_pool_violations(kv.block_pool, owners),
        *_owner_violations(
            kv.block_pool,
            owners,
            {table.request.request_id for table in tables} | {*manager.loads_held},
        ),
        *_hash_violations(kv.block_pool, owners),
        *_load_violations(manager),
    ]
    for table in tables:
        found += _table_violations(table, manager)
        for bystander in managers:
            if bystander is not manager:
                found += _bystander_violations(table, bystander)
    found += _page_violations(tables, manager, len(kv.block_pool.blocks))
    return found


Names = Mapping[str, Sequence[tuple[int, BlockHashWithGroupId | None]]]
"""Blocks of each request and their names, in the order of its table."""


def names_of(manager: HeadwiseManager) -> Names:
    """What requests hold before a step is scheduled, for `written_violations`."""
    return {
        request_id: [(block.block_id, block.block_hash) for block in blocks]
        for request_id, blocks in manager.req_to_blocks.items()
    }


def written_violations(
    manager: HeadwiseManager,
    requests: Mapping[str, Request],
    scheduled: SchedulerOutput,
    before: Names,
) -> list[Violation]:
    """Checks what a step is about to write, of the layers that drop entries.

    `before` is what `names_of` gave before it was scheduled.
    """
    found, now, size = [], names_of(manager), manager.block_size
    begun = {new.req_id for new in scheduled.scheduled_new_reqs}
    begun |= scheduled.scheduled_cached_reqs.resumed_req_ids
    for request_id, num_new in scheduled.num_scheduled_tokens.items():
        end = requests[request_id].num_computed_tokens
        written = slice((end - num_new) // size, -(-end // size))
        # What it held before it was preempted in this step, or cut, is not its own any more.
        held = () if request_id in begun else before.get(request_id, ())[written]
        wrong = tuple(
            block
            for (block, name), (same, _) in zip(held, now[request_id][written], strict=False)
            if name and block == same
        )
        if wrong:
            found.append(Violation("written", "had a name", wrong, (request_id,)))
    return found


def plan_violations(
    manager: HeadwiseManager, requests: Mapping[str, Request], plans: Mapping[str, str]
) -> list[Violation]:
    """Compares the plans of a worker with the scheduler's."""
    return [
        Violation("plan", f"{fingerprint} in a worker, {own} here", (), (request_id,))
        for request_id, fingerprint in plans.items()
        if (request := requests.get(request_id)) is not None
        and (own := manager.plan_of(request).fingerprint) != fingerprint
    ]


class Place(NamedTuple):
    """Where a block table names a block: whose it is, the place, and the group of layers."""

    request_id: str
    number: int
    group_id: int


def block_owners(kv: KVCacheManager) -> dict[int, list[Place]]:
    """Maps the id of every held block to the places that name it.

    A load of a stored context is an owner like a request.
    """
    owners: dict[int, list[Place]] = defaultdict(list)
    for group_id, manager in enumerate(kv.coordinator.single_type_managers):
        tables = [*manager.req_to_blocks.items()]
        if isinstance(manager, HeadwiseManager):
            tables += manager.loads_held.items()
        for request_id, blocks in tables:
            for index, block in enumerate(blocks):
                if not block.is_null:
                    owners[block.block_id].append(Place(request_id, index, group_id))
    return owners


def free_blocks(pool: BlockPool) -> list[KVCacheBlock]:
    """The blocks of the free queue; cut off where a damaged queue runs in circles."""
    return list(islice(pool.free_block_queue.iter_blocks_after(None), len(pool.blocks) + 1))


Owners = Mapping[int, Collection[Place]]


def _request_ids(block_ids: Iterable[int], owners: Owners) -> tuple[str, ...]:
    return tuple(dict.fromkeys(place.request_id for b in block_ids for place in owners.get(b, ())))


def _pool_violations(pool: BlockPool, owners: Owners) -> Iterator[Violation]:
    free = [block.block_id for block in free_blocks(pool)]
    expected = [
        block.block_id
        for block in pool.blocks
        if not block.is_null and block.block_id not in owners
    ]
    lost, taken = set(expected) - set(free), set(free) - set(expected)
    if lost:
        yield Violation("pool", "neither free nor held", tuple(sorted(lost)))
    if taken:
        blocks = tuple(sorted(taken))
        yield Violation("pool", "free and held", blocks, _request_ids(blocks, owners))
    if len(free) != pool.get_num_free_blocks():
        counts = f"{len(free)} blocks are free, the pool counts {pool.get_num_free_blocks()}"
        yield Violation("pool", counts)


def _owner_violations(pool: BlockPool, owners: Owners, unfinished: set[str]) -> Iterator[Violation]:
    for block in pool.blocks:
        block_id, named = block.block_id, owners.get(block.block_id, ())
        if block.is_null:
            continue
        request_ids = _request_ids([block_id], owners)
        if block.ref_cnt != len(named):
            counts = f"{block.ref_cnt} references, {len(named)} owners"
            yield Violation("references", counts, (block_id,), request_ids)
        if not unfinished.issuperset(request_ids):
            strangers = ", ".join(sorted(set(request_ids) - unfinished))
            yield Violation("owners", f"held by {strangers}", (block_id,), request_ids)
        if len(named) > 1 and (block.block_hash is None or len({p[1:] for p in named}) > 1):
            places = ", ".join(f"{place.request_id}[{place.number}]" for place in named)
            hashed = "not hashed" if block.block_hash is None else "hashed"
            yield Violation("shared", f"{hashed}, at {places}", (block_id,), request_ids)


def _hash_violations(pool: BlockPool, owners: Owners) -> Iterator[Violation]:
    found_by = pool.cached_block_hash_to_block
    hashes = set()
    for block in pool.blocks:
        if block.block_hash is None:
            continue
        hashes.add(block.block_hash)
        if block.is_null or not found_by.contain(block.block_hash, block.block_id):
            ids = (block.block_id,)
            yield Violation("hashes", "not found by its hash", ids, _request_ids(ids, owners))
    if len(found_by) > len(hashes):
        yield Violation("hashes", f"{len(found_by) - len(hashes)} hashes without a hashed block")


def _load_violations(manager: HeadwiseManager) -> Iterator[Violation]:
    for name, blocks in manager.loads_held.items():
        found = tuple(block.block_id for block in blocks if block.block_hash is not None)
        if found:
            yield Violation("loads", "found before they are read", found, (name,))


def _table_violations(table: _Table, manager: HeadwiseManager) -> Iterator[Violation]:
    request, blocks = table.request, table.blocks
    request_ids = (request.request_id,)
    if len(blocks) * manager.block_size < request.num_computed_tokens:
        tokens = f"{len(blocks)} blocks for {request.num_computed_tokens} tokens"
        yield Violation("covered", tokens, (), request_ids)
    cut = table.made
    null = [index for index, block in enumerate(blocks) if block.is_null]
    if null != [*range(cut.num_freed if cut else 0)]:
        detail = (
            f"freed blocks {null} at {request.num_computed_tokens} tokens, cuts at "
            f"{[cut.position for cut in table.cuts]}"
        )
        yield Violation("freed", detail, (), request_ids)
    # With one cut all is held until then; of a context that was found, less than ever.
    if len(table.cuts) > 1 and request.request_id not in manager.found:
        held = tuple(block.block_id for block in blocks if not block.is_null)
        num_tokens = len(blocks) * manager.block_size
        most = table.cuts.most_held(num_tokens, manager.block_size, manager.num_ahead)
        if len(held) > most:
            detail = f"holds {len(held)} blocks, at most {most} by plan"
            yield Violation("bounded", detail, held, request_ids)
    if cut is None:
        return
    computed_later = table.cuts.first_position // manager.block_size
    exposed = [
        block.block_id
        for index, block in enumerate(blocks)
        if block.block_hash is not None
        and (index < cut.first_of_tail or index >= computed_later)
        and not manager.has_name(request, index, block)
    ]
    if exposed:
        yield Violation("named", "named", tuple(exposed), request_ids)


def _bystander_violations(table: _Table, manager: PlannedManager) -> Iterator[Violation]:
    """Checks a request's table of layers that drop nothing."""
    request, size = table.request, manager.block_size
    blocks = manager.req_to_blocks.get(request.request_id, [])
    if len(blocks) * size < request.num_computed_tokens:
        tokens = f"{len(blocks)} blocks for {request.num_computed_tokens} tokens"
        yield Violation("covered", tokens, (), (request.request_id,))
    if not table.cuts:
        return
    first = table.cuts.first_position // size
    hashed = tuple(block.block_id for block in blocks[first:] if block.block_hash is not None)
    if hashed:
        yield Violation("beside", "hashed", hashed, (request.request_id,))


def _page_violations(
    tables: list[_Table], manager: HeadwiseManager, num_blocks: int
) -> Iterator[Violation]:
    """Builds the page tables that a worker would, with an even share for every head.

    The first layer stands for all: a pool hands out the same pages of the same blocks, only to
    other heads, and in other layers they have the same places. Blocks are kernel blocks here, as
    the worker's are.
    """
    block_size, num_kv_heads = manager.block_size, manager.kv_cache_spec.num_kv_heads
    page_size = manager.sizes.page_size or block_size
    parts = torch.arange(block_size // page_size)
    num_pages = num_blocks * len(parts)
    read = [
        (table, cut)
        for table in tables
        if (cut := table.made) is not None
        and len(table.blocks) * block_size >= table.request.num_computed_tokens
    ]
    if not read:
        return
    seq_lens = torch.tensor([table.request.num_computed_tokens for table, _ in read])
    width = max(len(table.blocks) for table, _ in read) * len(parts)
    block_table = torch.zeros(len(read), width, dtype=torch.int64)
    held_by = torch.full((num_pages,), -1)  # which row a kernel block is of
    is_named = torch.zeros(num_pages, dtype=torch.bool)  # whether rows may share it
    for row, (table, cut) in enumerate(read):
        ids = torch.tensor([block.block_id for block in table.blocks])
        ids = (ids[:, None] * len(parts) + parts).flatten()
        block_table[row, : len(ids)] = ids
        held_by[ids[cut.first_packed :]] = row
        is_hashed = [b.block_hash is not None for b in table.blocks]
        hashed = torch.tensor(is_hashed).repeat_interleave(len(parts))
        is_named[ids[cut.first_packed :][hashed[cut.first_packed :]]] = True
    held_by[: len(parts)] = -1  # the null block
    num_packed = torch.tensor([cut.num_packed for _, cut in read])
    offsets = num_packed[:, None] * torch.arange(num_kv_heads + 1)
    pages, lengths = headwise_page_table(
        block_table,
        seq_lens,
        torch.tensor([cut.first_packed for _, cut in read]),
        torch.tensor([cut.tail_start for _, cut in read]),
        offsets[None],
        page_size,
        num_pages,
        per_block=len(parts),
    )
    pages, lengths = (part.view(len(read), num_kv_heads, -1).long() for part in (pages, lengths))
    is_read = torch.arange(pages.shape[-1]) < -(-lengths // page_size)
    rows = torch.arange(len(read))[:, None, None]
    ids = pages // num_kv_heads
    is_foreign = is_read & (held_by[ids] != rows) & ~is_named[ids]
    for row, (table, cut) in enumerate(read):
        request_ids = (table.request.request_id,)
        if is_foreign[row].any():
            foreign = pages[row][is_foreign[row]] // num_kv_heads // len(parts)
            blocks = tuple(foreign.unique().tolist())
            yield Violation("pages", "read, but not of it", blocks, request_ids)
        packed = block_table[row, cut.first_packed : cut.first_packed + cut.num_packed]
        run = run_pages(packed, num_kv_heads)
        if not torch.equal(pages[row, :, : cut.num_packed].flatten(), run):
            detail = "packed in another order than read"
            blocks = tuple((packed // len(parts)).unique().tolist())
            yield Violation("pages", detail, blocks, request_ids)

"""Stored contexts on their way into the pool: blocks that nobody finds until workers read them.

A request whose context is stored, but not in the pool, waits as it does for a neighbour who
compresses the same one. Blocks are taken for the context, not for the request: once all workers say
that they hold it, the blocks get the names under which any request finds a context, and are given
back to the pool. So a request that is aborted, preempted or late needs no care, and one whose load
fails computes its context.
"""

from dataclasses import dataclass, field
from pathlib import Path

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.notice import Found, Load, StepNotice
from vllm_kvselect.engine.states.identity import StoreIdentity
from vllm_kvselect.engine.states.names import StateNames
from vllm_kvselect.engine.states.stored_names import stored_name
from vllm_kvselect.planning.plan import Plan
from vllm_kvselect.store.file import Place
from vllm_kvselect.store.folder import Folder

_MOST_AT_ONCE = 4
"""Loads at a time: what arrives is to be read before the next ones take the pool's blocks."""


@dataclass(eq=False)
class _Pending:
    """A load that is not finished: who asked first names the blocks; others may wait, too."""

    name: str
    blocks: list[KVCacheBlock]
    request: Request
    plan: Plan
    waiting: set[str] = field(default_factory=set)


class ContextLoads:
    """The scheduler's side of a folder of contexts."""

    def __init__(
        self, eviction: EvictionConfig, identity: StoreIdentity, pool: BlockPool, names: StateNames
    ) -> None:
        assert eviction.context_store is not None
        self._folder = Folder(Path(eviction.context_store))
        self._identity, self._pool, self._names = identity, pool, names
        self._pending: dict[int, _Pending] = {}
        self._untold = StepNotice()
        self._num_loads = 0
        self._name_of: dict[str, str | None] = {}
        # Requests that have waited once, found nothing after all, and wait no more.
        self._had: set[str] = set()
        # By name: the files that were refused. One that takes their place is another.
        self._refused: dict[str, list[tuple[int, int] | None]] = {}

    def must_wait(self, request: Request, plan: Plan) -> bool:
        """Whether a waiting request's context is being loaded; the load begins if it can."""
        if not _may_be_stored(plan) or self._names.is_there(request, plan, plan.num_states - 1):
            return False
        name = self.name_of(request, plan)
        if name is None:
            return False
        for load in self._pending.values():
            if load.name == name:
                load.waiting.add(request.request_id)
                return True
        if request.request_id in self._had or not self._is_stored(name):
            return False
        if len(self._pending) >= _MOST_AT_ONCE:
            return True
        return self._begin(name, request, plan)

    def name_to_store(self, request: Request, plan: Plan, found: Found | None) -> str | None:
        """The name under which a request's context is to be stored once it is compressed.

        None if it is stored, was found, or cannot be.
        """
        num_made = 0 if found is None else found.num_made
        if not _may_be_stored(plan) or num_made >= plan.num_states:
            return None
        name = self.name_of(request, plan)
        return None if name is None or self._is_stored(name) else name

    def name_of(self, request: Request, plan: Plan) -> str | None:
        """The name of a request's context in the folder; asked in each step that it waits."""
        if request.request_id not in self._name_of:
            self._name_of[request.request_id] = stored_name(request, plan, self._identity)
        return self._name_of[request.request_id]

    def take_notice(self) -> StepNotice:
        """What the workers have to be told."""
        untold, self._untold = self._untold, StepNotice()
        return untold

    def finish(self, loaded: dict[int, bool]) -> None:
        """Takes over what all workers say of loads, by number: whether each is in its blocks."""
        for number, is_whole in loaded.items():
            # One that was dropped since is none of our blocks' business any more.
            if (load := self._pending.pop(number, None)) is None:
                continue
            if is_whole:
                self._names.take(load.request, load.plan, load.plan.num_states - 1, load.blocks)
            else:
                self._refused[load.name] = self._versions(load.name)
            self._had |= load.waiting
            self._free(load)

    def forget(self, request_id: str) -> None:
        """Forgets a request; a load that nobody waits for any more is dropped."""
        self._name_of.pop(request_id, None)
        self._had.discard(request_id)
        for number, load in [*self._pending.items()]:
            load.waiting.discard(request_id)
            if not load.waiting:
                self._drop(number)

    def drop_all(self) -> None:
        """Gives up all loads; who waits for them asks again."""
        for number in [*self._pending]:
            self._drop(number)

    @property
    def held(self) -> dict[str, list[KVCacheBlock]]:
        """Blocks that wait for a context, by a name for each load."""
        return {f"load {number}": load.blocks for number, load in self._pending.items()}

    def _begin(self, name: str, request: Request, plan: Plan) -> bool:
        num_blocks = self._names.num_shared(plan, plan.num_states - 1)
        if num_blocks > self._pool.get_num_free_blocks():
            return False  # nor will it find blocks to compute its context with
        blocks = self._pool.get_new_blocks(num_blocks)
        number = self._num_loads = self._num_loads + 1
        waiting = {request.request_id}
        self._pending[number] = _Pending(name, blocks, request, plan, waiting)
        self._untold.loads[number] = Load(name, [block.block_id for block in blocks])
        return True

    def _drop(self, number: int) -> None:
        """Gives the blocks of a load back before the next step, in which workers are told so.

        Until then they may write to them. Whoever gets the blocks writes to them in that step at
        the earliest, after the workers have read the notice.
        """
        load = self._pending.pop(number)
        if self._untold.loads.pop(number, None) is None:
            self._untold.dropped.append(number)
        self._free(load)

    def _free(self, load: _Pending) -> None:
        # As vLLM does: the last blocks are reused first.
        self._pool.free_blocks(reversed(load.blocks))

    def _is_stored(self, name: str) -> bool:
        """Whether all ranks have a file that was not refused."""
        versions = self._versions(name)
        return None not in versions and self._refused.get(name) != versions

    def _versions(self, name: str) -> list[tuple[int, int] | None]:
        num_ranks = self._identity.num_ranks
        return [self._folder.version(Place(name, rank, num_ranks)) for rank in range(num_ranks)]


def _may_be_stored(plan: Plan) -> bool:
    """Whether a request's context may come from a folder: what is not cut again, as files lack it.

    Names of states tell such requests from others.
    """
    return plan.has_context and plan.ends_with_states

"""Every invariant is missed when it is broken, and only those who broke it are stopped."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from tests.engine.simulated_server import EVICTION, IntegrityError, Server, Settings
from vllm_kvselect.engine.report import StepReport
from vllm_kvselect.engine.scheduler.block_manager import HeadwiseManager
from vllm_kvselect.engine.scheduler.checked_scheduler import (
    CheckedAsyncScheduler,
    CheckedScheduler,
    mend,
)
from vllm_kvselect.engine.scheduler.integrity import (
    INVARIANTS,
    Violation,
    find_violations,
    names_of,
    plan_violations,
    written_violations,
)


class CheckedServer(Server):
    """A server with the checked scheduler, and requests in every phase.

    `decoding` has freed blocks, `sharing` has the same prefix, `short` drops nothing, `prefilling`
    is in the middle of its prompt.
    """

    def __init__(self, settings: Settings) -> None:
        is_async = settings.async_scheduling
        scheduler = CheckedAsyncScheduler if is_async else CheckedScheduler
        super().__init__(settings, scheduler_class=scheduler)
        self.failed: set[str] = set()
        self.decoding = self.add([*range(60)], 30)
        for _ in range(4):
            self.step()
        self.sharing = self.add([*range(50), *range(1000, 1030)], 30)
        self.short = self.add([*range(2000, 2015)], 30)
        self.step()
        self.prefilling = self.add([*range(3000, 3080)], 30)
        self.step(20)

    @property
    def manager(self) -> HeadwiseManager:
        (manager,) = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        return manager

    @property
    def pool(self) -> BlockPool:
        return self.scheduler.kv_cache_manager.block_pool

    def held(self, request_id: str) -> list[KVCacheBlock]:
        return [block for block in self.manager.req_to_blocks[request_id] if not block.is_null]

    def violations(self) -> list[Violation]:
        return find_violations(self.scheduler.kv_cache_manager, self.scheduler.requests)

    def check(self, output: Any, names: Any) -> None:
        """The scheduler checks itself."""

    def receive(self, request_id: str, tokens: list[int], reason: FinishReason | None) -> None:
        if reason != FinishReason.ERROR:
            super().receive(request_id, tokens, reason)
            return
        assert tokens == []
        del self.unfinished[request_id]
        self.failed.add(request_id)


def hash_packed(server: CheckedServer) -> None:
    request, blocks = server.scheduler.requests["r1"], server.manager.req_to_blocks["r1"]
    first = server.manager.plan_of(request).cuts[0].first_packed
    server.pool.cache_full_blocks(request, blocks, first, first + 1, server.manager.block_size, 0)


def share_unhashed(server: CheckedServer) -> None:
    (block,) = server.manager.req_to_blocks[server.decoding][-1:]
    server.manager.req_to_blocks[server.short][-1].ref_cnt -= 1
    server.manager.req_to_blocks[server.short][-1] = block
    block.ref_cnt += 1


def free_held(server: CheckedServer) -> None:
    server.pool.free_blocks(server.held(server.short)[-1:])


def lose_free(server: CheckedServer) -> None:
    server.pool.free_block_queue.popleft()


def miscount_free(server: CheckedServer) -> None:
    server.pool.free_block_queue.num_free_blocks -= 1


def reference_twice(server: CheckedServer) -> None:
    server.held(server.short)[0].ref_cnt += 1


def keep_after_finish(server: CheckedServer) -> None:
    server.manager.req_to_blocks["gone"] = server.pool.get_new_blocks(2)


def forget_hash(server: CheckedServer) -> None:
    server.held(server.short)[0].reset_hash()


def hash_unfound(server: CheckedServer) -> None:
    block = server.held(server.short)[0]
    server.pool.cached_block_hash_to_block.pop(block.block_hash, block.block_id)


def free_in_prefill(server: CheckedServer) -> None:
    server.manager._remove_blocks_in_range(server.prefilling, 0, 1)


def free_packed(server: CheckedServer) -> None:
    blocks = server.manager.req_to_blocks[server.decoding]
    first = next(index for index, block in enumerate(blocks) if not block.is_null)
    server.pool.free_blocks([blocks[first]])
    blocks[first] = server.pool.null_block


def cut_table(server: CheckedServer) -> None:
    server.pool.free_blocks([server.manager.req_to_blocks[server.decoding].pop(-2)])


DAMAGE: dict[str, tuple[Callable[[CheckedServer], None], set[str], list[str]]] = {
    "a packed block is hashed": (hash_packed, {"named"}, ["decoding"]),
    "a tail block is shared": (share_unhashed, {"shared", "pool"}, ["decoding", "short"]),
    "a held block is freed": (free_held, {"pool", "references"}, ["short"]),
    "a free block is lost": (lose_free, {"pool"}, []),
    "free blocks are miscounted": (miscount_free, {"pool"}, []),
    "a reference too many": (reference_twice, {"references"}, ["short"]),
    "a finished request holds blocks": (keep_after_finish, {"owners"}, []),
    "a block forgets its hash": (forget_hash, {"hashes"}, []),
    "a hashed block is not found": (hash_unfound, {"hashes"}, ["short"]),
    "freed while prefilling": (free_in_prefill, {"freed"}, ["prefilling"]),
    "a packed block is freed": (free_packed, {"freed", "pages"}, ["decoding"]),
    "a table too short": (cut_table, {"covered"}, ["decoding"]),
}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named_and_stops_only_its_requests(name: str, async_scheduling: bool) -> None:
    damage, invariants, concerned = DAMAGE[name]
    server = CheckedServer(Settings(num_spare_blocks=60, async_scheduling=async_scheduling))
    assert server.violations() == []
    requests = {getattr(server, request) for request in concerned}
    damage(server)
    violations = server.violations()
    assert {violation.invariant for violation in violations} == invariants
    named = {request_id for violation in violations for request_id in violation.request_ids}
    assert named - {"gone"} == requests

    # What they read until they are stopped does not matter: nobody sees it.
    server.worker.damaged = requests
    server.step()
    server.step()
    assert server.violations() == []
    server.drain()
    assert server.failed == requests
    assert server.violations() == []


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_request_that_a_worker_plans_otherwise_is_stopped(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = CheckedServer(Settings(num_spare_blocks=60, async_scheduling=async_scheduling))
    requests, execute = server.scheduler.requests, server.worker.execute
    plans = {name: server.manager.plan_of(requests[name]).fingerprint for name in requests}
    assert plan_violations(server.manager, requests, plans) == []
    plans[server.short] = plans[server.decoding]

    def execute_and_report(output: SchedulerOutput) -> ModelRunnerOutput:
        made = execute(output)
        made.kv_connector_output = StepReport([], [], [], [], 0.0, 0, plans).as_connector_output()
        return made

    (violation,) = plan_violations(server.manager, requests, plans)
    assert violation.invariant == "plan"
    monkeypatch.setattr(server.worker, "execute", execute_and_report)
    server.worker.damaged = {server.short}
    server.step()
    server.step()
    monkeypatch.undo()
    server.drain()
    assert server.failed == {server.short}
    assert server.violations() == []


def test_every_invariant_is_tested() -> None:
    damaged = set().union(*(invariants for _, invariants, _ in DAMAGE.values()))
    # "beside" by tests/engine/test_block_manager.py.
    assert damaged | {"plan", "bounded", "loads", "beside", "written"} == {*INVARIANTS}
    page = Path(__file__).parents[2].joinpath("docs", "invariants.md").read_text(encoding="utf-8")
    assert [name for name in INVARIANTS if f"| `{name}` |" not in page] == []


def test_a_context_that_is_found_before_it_is_read_is_named_and_found_no_more() -> None:
    stored = {"context": 64, "context_store": "folder"}
    server = Server(Settings(eviction=EVICTION.model_copy(update=stored), stores=True))
    server.add([*range(100)], 3)
    server.drain()
    server.add([*range(100)], 3)
    server.scheduler.schedule()
    [load] = server.loads._pending.values()
    kv, requests = server.scheduler.kv_cache_manager, server.scheduler.requests
    assert find_violations(kv, requests) == []
    server.loads._names.take(load.request, load.plan, load.plan.num_states - 1, load.blocks)
    [violation] = find_violations(kv, requests)
    assert (violation.invariant, violation.request_ids) == ("loads", ("load 1",))
    mend(kv, requests, [violation])
    assert find_violations(kv, requests) == []


@pytest.mark.parametrize("is_named", [False, True])
def test_a_step_that_would_write_to_a_named_block_is_found(is_named: bool) -> None:
    server = CheckedServer(Settings(num_spare_blocks=60))
    server.step()
    scheduler, block = server.scheduler, server.held(server.short)[-1]
    assert scheduler.requests[server.short].num_computed_tokens % server.manager.block_size
    if is_named:
        name = make_block_hash_with_group_id(BlockHash(b"any"), 0)
        block.set_block_hash(name)
        server.pool.cached_block_hash_to_block.insert(name, block)
    names = names_of(server.manager)
    output = scheduler.schedule()
    found = written_violations(server.manager, scheduler.requests, output, names)
    blocks = [(block.block_id,)] if is_named else []
    assert [each.block_ids for each in found] == blocks


def test_a_request_that_keeps_what_its_cuts_free_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadwiseManager, "_due_cut", lambda *_: None)
    eviction = EVICTION.model_copy(update={"prompt_interval": 16})
    server = Server(Settings(eviction=eviction, num_spare_blocks=60))
    server.add([*range(120)], 5)
    with pytest.raises(IntegrityError, match="bounded: holds 16 blocks, at most 13 by plan"):
        server.drain()

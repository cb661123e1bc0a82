"""A server in miniature: vLLM's real scheduler and KV cache manager with our spec, and no model.

`TaggedWorker` takes the model's place. After every scheduling step the package's own integrity
check runs, and facts that are counted here, in blocks and tokens, independently of the package.
"""

import copy
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.engine.tagged_drop import NUM_KV_HEADS
from tests.engine.tagged_rows import (
    Retained,
    Sizes,
    retained_in_prompt,
    retained_in_rounds,
    sparse_span,
)
from tests.engine.tagged_store import IDENTITY, MemoryFolder
from tests.engine.tagged_worker import TaggedWorker
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.engine.cuda.builder import DeviceSplitter
from vllm_kvselect.engine.scheduler.block_manager import headwise_manager
from vllm_kvselect.engine.scheduler.cut_scheduler import CutAsyncScheduler, CutScheduler
from vllm_kvselect.engine.scheduler.integrity import (
    Names,
    find_violations,
    names_of,
    plan_violations,
    written_violations,
)
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec, StateSpec, WindowSpec
from vllm_kvselect.engine.states.loads import ContextLoads
from vllm_kvselect.engine.step.split import Splitter
from vllm_kvselect.planning.cuts import most_blocks
from vllm_kvselect.tiny_model import tiny_model

MAX_MODEL_LEN = 160
STOP_TOKEN = 1
EVICTION = EvictionConfig(method="adakv", budget=20, window=4)


class IntegrityError(AssertionError):
    """The package's own check found something."""


class LostError(AssertionError):
    """A request, a token or a block went missing, or appeared from nowhere."""


@dataclass(frozen=True)
class Beside:
    """Layers that drop nothing, beside those that do.

    Attributes:
        block_size: Tokens of a block of theirs.
        window: Tokens that a token sees; None for a state's.
    """

    block_size: int
    window: int | None = None

    @property
    def most_blocks(self) -> int:
        """What a request holds of them at most: all, or the states of two steps."""
        return 2 if self.window is None else MAX_MODEL_LEN // self.block_size + 1

    def spec(self, eviction: EvictionConfig, is_cached: bool) -> WindowSpec | StateSpec:
        """Their cache."""
        shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
        if self.window is not None:
            size, window = self.block_size, self.window
            return WindowSpec(block_size=size, sliding_window=window, eviction=eviction, **shape)
        return StateSpec(
            block_size=self.block_size if is_cached else MAX_MODEL_LEN,
            shapes=((8,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align" if is_cached else "none",
            eviction=eviction,
        )


@dataclass(frozen=True)
class Settings:
    """What a server is started with: most by vLLM's own names."""

    block_size: int = 4
    num_spare_blocks: int = 0
    eviction: EvictionConfig = EVICTION
    max_num_seqs: int = 6
    max_num_batched_tokens: int = 200
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    async_scheduling: bool = False
    enable_prefix_caching: bool = True
    scheduler_reserve_full_isl: bool = False
    stores: bool = False
    page_size: int | None = None
    beside: Beside | None = None
    announces: bool = False

    @property
    def sizes(self) -> Sizes:
        """Tokens of a block and of a kernel block."""
        return Sizes(self.block_size, self.page_size or self.block_size)

    @property
    def least_step(self) -> int:
        """Tokens that a step must hold: a sparse segment, beside all requests that generate."""
        sparse = self.eviction.prefill_segment if self.eviction.may_prefill_sparsely else 0
        return sparse and sparse + self.max_num_seqs

    @property
    def is_bounded(self) -> bool:
        """Whether no request may hold all of its tokens at once, so that the pool may be less."""
        eviction = self.eviction
        return bool(
            eviction.enabled
            and eviction.prompt_interval
            and eviction.decode_budget
            and not eviction.allow_override
        )

    @property
    def num_blocks(self) -> int:
        """vLLM itself refuses a pool that cannot hold the longest request, and takes one block."""
        most = MAX_MODEL_LEN // self.block_size
        if self.is_bounded:
            most = most_blocks(MAX_MODEL_LEN, self.block_size, self.eviction)
        if self.beside is not None:
            most += self.beside.most_blocks
        return most + 1 + self.num_spare_blocks


@cache
def vllm_config() -> VllmConfig:
    load_general_plugins()
    init_none_hash(sha256)
    arguments: dict[str, Any] = {"model": str(tiny_model()), "max_model_len": MAX_MODEL_LEN}
    return EngineArgs(**arguments, max_num_batched_tokens=256).create_engine_config()


@cache
def structured_output_manager() -> StructuredOutputManager:
    return StructuredOutputManager(vllm_config())


def make_scheduler(settings: Settings, scheduler_class: type[Scheduler]) -> Scheduler:
    config = copy.copy(vllm_config())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = MAX_MODEL_LEN
    scheduling = config.scheduler_config = copy.copy(config.scheduler_config)
    scheduling.max_num_seqs = settings.max_num_seqs
    scheduling.max_num_batched_tokens = settings.max_num_batched_tokens
    scheduling.long_prefill_token_threshold = settings.long_prefill_token_threshold
    scheduling.policy = settings.policy
    scheduling.async_scheduling = settings.async_scheduling
    scheduling.scheduler_reserve_full_isl = settings.scheduler_reserve_full_isl
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks = settings.num_blocks
    config.cache_config.block_size = settings.block_size
    config.cache_config.enable_prefix_caching = settings.enable_prefix_caching
    if settings.announces:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    spec = HeadwiseSpec(
        block_size=settings.block_size,
        num_kv_heads=NUM_KV_HEADS,
        head_size=8,
        dtype=torch.float32,
        eviction=settings.eviction,
        store=IDENTITY if settings.stores else None,
        page_size=settings.page_size,
    )
    groups = [KVCacheGroupSpec(["layer"], spec)]
    if (beside := settings.beside) is not None:
        is_cached = settings.enable_prefix_caching
        groups.append(KVCacheGroupSpec(["beside"], beside.spec(settings.eviction, is_cached)))
        config.cache_config.mamba_cache_mode = "align" if is_cached else "none"
    kv_cache = KVCacheConfig(settings.num_blocks, [], groups)
    sizes = resolve_kv_cache_block_sizes(kv_cache, config)
    return scheduler_class(config, kv_cache, structured_output_manager(), *sizes)


def own_eviction(
    server: EvictionConfig, extra_args: Mapping[str, Any], max_tokens: int
) -> EvictionConfig:
    """What a request must be served with: what it asks for, where the server lets it choose.

    The front end refuses it elsewhere. Should it come all the same, nothing of it is dropped; nor
    is anything of a prompt that only one token follows, unless it marks a context.
    """
    fields = {
        "kv_eviction": "method",
        "kv_eviction_budget": "budget",
        "kv_eviction_context": "context",
        "kv_eviction_decode_budget": "decode_budget",
        "kv_eviction_decode_interval": "decode_interval",
        "kv_eviction_keep_first": "keep_first",
        "kv_eviction_prompt_interval": "prompt_interval",
        "kv_prefill": "prefill",
        "kv_prefill_budget": "prefill_budget",
    }
    changes: dict[str, Any] = {fields[key]: value for key, value in extra_args.items()}
    nothing = {"method": "none", "prefill": "dense"}
    if any(
        name not in server.allow_override and value != getattr(server, name)
        for name, value in changes.items()
    ):
        changes = nothing
    given = server.model_dump()
    chosen = given | changes
    by_windows = ("adakv", "adakv-perturb")
    if chosen["method"] in by_windows and server.method not in (*by_windows, "none"):
        # In a prompt its window would be far from the question.
        changes.setdefault("prompt_interval", 0)
    chosen = given | changes
    if chosen["method"] != "none" and (chosen["prompt_interval"] and chosen["prefill"] != "dense"):
        changes = nothing  # what cannot be done together
    chosen = given | changes
    if max_tokens == 1 and chosen["context"] is None:
        changes = {**changes, "method": "none"}
    return EvictionConfig.parse(given | changes)


@dataclass
class Expected:
    """What is known of a request from outside."""

    number: int
    prompt: list[int]
    max_tokens: int
    eviction: EvictionConfig
    received: list[int] = field(default_factory=list)
    stops: bool = False

    def token(self, index: int) -> int:
        return 10_000 * self.number + index


class Server:
    """A scheduler, a worker, and between them the steps in flight that vLLM's engine core keeps.

    Args:
        settings: What the server is started with.
        seed: Shuffles the rows of its batches.
        seen: Counts what happens.
        scheduler_class: By default ours.
    """

    def __init__(
        self,
        settings: Settings,
        seed: int = 0,
        seen: Counter[str] | None = None,
        scheduler_class: type[Scheduler] | None = None,
    ) -> None:
        self.settings, self.seen = settings, Counter() if seen is None else seen
        ours = CutAsyncScheduler if settings.async_scheduling else CutScheduler
        self.scheduler = make_scheduler(settings, scheduler_class or ours)
        folder = MemoryFolder(Random(seed)) if settings.stores else None
        if folder is not None:
            self.loads._folder = folder
        self.worker = TaggedWorker(
            settings.eviction,
            settings.num_blocks,
            settings.sizes,
            MAX_MODEL_LEN,
            self._sample,
            lambda request_id: self.all[request_id].eviction,
            Random(seed),
            # Schedulers run ahead of devices only.
            DeviceSplitter if settings.async_scheduling else Splitter,
            folder,
            self._layers_beside(),
        )
        self.unfinished: dict[str, Expected] = {}
        self.all: dict[str, Expected] = {}
        self.texts: list[list[int]] = []
        self._in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._depth = 2 if settings.async_scheduling else 1
        self._num_idle = 0
        self.in_step = False

    def _layers_beside(self) -> tuple[int, int | None] | None:
        """Tokens of a block and of the window of the group that drops nothing."""
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        if (beside := self.settings.beside) is None:
            return None
        return managers[1].block_size, beside.window

    @property
    def loads(self) -> ContextLoads:
        manager = headwise_manager(self.scheduler.kv_cache_manager)
        assert manager.loads is not None
        return manager.loads

    def _sample(self, request_id: str, index: int) -> int:
        expected = self.all[request_id]
        return STOP_TOKEN if expected.stops else expected.token(index)

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int = 0,
        extra_args: dict[str, Any] | None = None,
    ) -> str:
        if self.settings.is_bounded:  # the front end refuses what would not fit
            extra_args, max_tokens = None, max(2, max_tokens)  # of one token nothing is dropped
        eviction = own_eviction(self.settings.eviction, extra_args or {}, max_tokens)
        expected = Expected(len(self.all) + 1, prompt, max_tokens, eviction)
        request_id = f"r{expected.number}"
        self.all[request_id] = self.unfinished[request_id] = expected
        params = SamplingParams(
            max_tokens=max_tokens, stop_token_ids=[STOP_TOKEN], extra_args=extra_args
        )
        hash_size = self.scheduler.kv_cache_manager.block_pool.hash_block_size
        hasher = get_request_block_hasher(hash_size, sha256)
        request = Request(
            request_id,
            list(prompt),
            params,
            None,
            arrival_time=float(expected.number),
            priority=priority,
            block_hasher=hasher if self.settings.enable_prefix_caching else None,
        )
        self.scheduler.add_request(request)
        self.seen["requests"] += 1
        return request_id

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.texts.append(self.unfinished.pop(request_id).prompt)
        self.seen["aborted"] += 1

    def step(self, token_budget: int = 200, between: Callable[[], None] = lambda: None) -> None:
        """One turn of the engine core: schedule and execute, or take a result.

        Args:
            token_budget: Tokens of this step at most.
            between: What happens between execution and its result.
        """
        self.in_step = True
        settings = self.settings
        self.scheduler.max_num_scheduled_tokens = min(
            max(token_budget, settings.least_step), settings.max_num_batched_tokens
        )
        preempted = {r.request_id: r.num_preemptions for r in self.scheduler.requests.values()}
        names = names_of(headwise_manager(self.scheduler.kv_cache_manager))
        output = self.scheduler.schedule()
        waits = self.settings.stores and bool(self.loads.held)
        self.seen["steps"] += output.total_num_scheduled_tokens > 0
        for request in self.scheduler.requests.values():
            self.seen["preempted"] += request.num_preemptions - preempted[request.request_id]
        self.check(output, names)
        self._in_flight.appendleft((output, self.worker.execute(output)))
        manager = headwise_manager(self.scheduler.kv_cache_manager)
        plans = self.worker.live.take_new_plans()
        if wrong := plan_violations(manager, self.scheduler.requests, plans):
            raise IntegrityError("\n".join(map(str, wrong)))
        between()
        while len(self._in_flight) >= self._depth or (
            self._in_flight and not output.total_num_scheduled_tokens
        ):
            self._take_result()
        self._num_idle = 0 if output.total_num_scheduled_tokens or waits else self._num_idle + 1
        if self._num_idle > self._depth + 1 and self.unfinished:
            raise LostError(f"nothing runs, but {list(self.unfinished)} are not finished")
        self.in_step = False

    def _take_result(self) -> None:
        for outputs in self.scheduler.update_from_output(*self._in_flight.pop()).values():
            for output in outputs.outputs:
                self.receive(output.request_id, output.new_token_ids, output.finish_reason)

    def receive(self, request_id: str, tokens: list[int], reason: FinishReason | None) -> None:
        expected = self.unfinished.get(request_id)
        if expected is None:
            raise LostError(f"{request_id} is finished, but got {tokens}")
        for token in tokens:
            index = len(expected.received)
            if token not in (expected.token(index), STOP_TOKEN):
                raise LostError(f"{request_id} got token {token} at {index}")
            expected.received.append(token)
        num_tokens = len(expected.prompt) + len(expected.received)
        if expected.received[-1:] == [STOP_TOKEN]:
            due = FinishReason.STOP
        elif len(expected.received) >= expected.max_tokens or num_tokens >= MAX_MODEL_LEN:
            due = FinishReason.LENGTH
        else:
            due = None
        if reason != due:
            raise LostError(f"{request_id} ended with {reason} after {len(expected.received)}")
        if reason is not None:
            del self.unfinished[request_id]
            self.texts.append(expected.prompt + expected.received)
            self.seen[f"finished: {reason}"] += 1

    # What must hold after a step

    def check(self, output: SchedulerOutput, names: Names) -> None:
        kv, requests = self.scheduler.kv_cache_manager, self.scheduler.requests
        violations = find_violations(kv, requests)
        violations += written_violations(headwise_manager(kv), requests, output, names)
        if violations:
            raise IntegrityError("\n".join(map(str, violations)))
        self.check_nobody_is_lost()
        self.check_hits(output)
        for request in self.scheduler.requests.values():
            self.check_blocks(request)

    def check_nobody_is_lost(self) -> None:
        scheduler = self.scheduler
        queued = [*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting]
        names = sorted(request.request_id for request in queued)
        if not names == sorted(scheduler.requests) == sorted(self.unfinished):
            raise LostError(f"queued {names}, unfinished {sorted(self.unfinished)}")

    def check_hits(self, output: SchedulerOutput) -> None:
        """A hit is whole blocks and leaves a token to compute.

        It ends a block and a window before the first cut that is not made of it.
        """
        cached = output.scheduled_cached_reqs
        hits = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        hits |= {
            request_id: num_tokens
            for request_id, num_tokens in zip(
                cached.req_ids, cached.num_computed_tokens, strict=True
            )
            if request_id in cached.resumed_req_ids
        }
        for request_id, num_tokens in hits.items():
            request = self.scheduler.requests[request_id]
            all_retained = self.retained(request)
            retained = next((each for each in all_retained if each.position > num_tokens), None)
            cap = request.num_tokens - 1
            eviction = self.all[request_id].eviction
            made = [each for each in all_retained if each.position <= num_tokens]
            if made and made[-1].position >= request.num_prompt_tokens:
                raise LostError(f"{request_id} hits {num_tokens} tokens, with a cut of its own")
            if retained:
                size, window = self.settings.block_size, eviction.window
                cap = retained.position // size * size - size
                cap = max(0, min(cap, retained.position - window)) // size * size
            first = next(iter(all_retained), None)
            span = sparse_span(request.num_prompt_tokens, first, eviction)
            if span and span.start < num_tokens < span.end and num_tokens % span.size:
                raise LostError(f"{request_id} hits {num_tokens} tokens, a part of a segment")
            if num_tokens % self.settings.block_size or num_tokens > cap:
                raise LostError(f"{request_id} hits {num_tokens} tokens of at most {cap}")
            self.seen["hits"] += num_tokens > 0
            self.seen["hits up to the cap"] += bool(retained) and num_tokens == cap

    def check_blocks(self, request: Request) -> None:
        """A request holds a block for each started one of its tokens, less those freed."""
        manager = headwise_manager(self.scheduler.kv_cache_manager)
        blocks = manager.req_to_blocks.get(request.request_id, [])
        num_held = sum(not block.is_null for block in blocks)
        if request.status != RequestStatus.RUNNING:
            expected = 0
        else:
            expected = -(-request.num_computed_tokens // self.settings.block_size)
            num_computed = request.num_computed_tokens
            made = [each for each in self.retained(request) if num_computed > each.position]
            if made:
                expected -= made[-1].num_freed
                self.seen["steps of a request with freed blocks"] += 1
        if num_held != expected:
            raise LostError(f"{request.request_id} holds {num_held} blocks, not {expected}")

    def retained(self, request: Request) -> list[Retained]:
        """What is retained of a request, cut by cut."""
        expected = self.all[request.request_id]
        sizes, length = self.settings.sizes, request.num_prompt_tokens
        in_prompt = retained_in_prompt(length, sizes, expected.eviction)
        rounds = retained_in_rounds(length, expected.max_tokens, sizes, expected.eviction)
        return [*in_prompt, *rounds]

    def drain(self) -> None:
        """Runs until everybody is finished; then the pool is as it was at the start."""
        for _ in range(2000):
            if not self.unfinished and not self._in_flight:
                break
            self.step(64)
        self.check_end()

    def check_end(self) -> None:
        if self.unfinished or self.scheduler.requests:
            raise LostError(f"never finished: {list(self.unfinished)}")
        pool = self.scheduler.kv_cache_manager.block_pool
        manager = headwise_manager(self.scheduler.kv_cache_manager)
        if pool.get_num_free_blocks() != self.settings.num_blocks - 1:
            raise LostError(f"{pool.get_num_free_blocks()} of {self.settings.num_blocks} free")
        names = manager.names
        left = any(manager.req_to_blocks.values()), manager.num_cached_block, manager._planned
        if self.settings.stores:
            left = *left, self.loads.held, self.loads._name_of, self.loads._had
        if any((*left, names._sharing, names._of_states, names._wanted)):
            raise LostError("finished requests leave entries behind")
        if not self.scheduler.reset_prefix_cache():
            raise LostError("the prefix cache cannot be reset when nobody runs")

"""A state machine: whatever clients do and ask for, in any order, of servers of any settings.

Examples are small on purpose: blocks of 4 or 8 tokens, prompts next to every border, and pools that
barely hold the longest request, so that requests are preempted all the time.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.engine.simulated_server import MAX_MODEL_LEN, Beside, Server, Settings, own_eviction
from vllm_kvselect.config import OVERRIDE_NAMES, EvictionConfig
from vllm_kvselect.request import RequestError, request_config

PROFILE = settings(
    stateful_step_count=40,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
MAX_UNFINISHED = 10
SEGMENT = 16
# Where prompts may be prefilled sparsely, steps hold a segment; elsewhere they may be of a token.
BUT_PREFILL = tuple(name for name in OVERRIDE_NAMES if not name.startswith("prefill"))
SOME_OVERRIDES = ((), ("method",), ("budget",), ("context",), ("prefill", "prefill_budget"))
# Budgets hold the longest window and the largest block. Blocks, queries and pages tell apart pools,
# methods that need the whole prompt, and the others.
METHODS_OF_REQUESTS = (
    "none",
    "streaming-llm",
    "adakv-perturb",
    "layer-keydiff",
    "layer-probe",
    "knorm",
)
CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "kv_eviction": st.sampled_from(METHODS_OF_REQUESTS),
    "kv_eviction_budget": st.sampled_from((18, 21, 40, 0.2, 0.6)),
    "kv_eviction_context": st.sampled_from((7, 61, 64, 100)),
    "kv_eviction_decode_budget": st.sampled_from((0, 18, 26)),
    "kv_eviction_decode_interval": st.sampled_from((10, 12, 17)),
    "kv_eviction_keep_first": st.sampled_from((0, 3, 9)),
    "kv_eviction_prompt_interval": st.sampled_from((0, 10, 24)),
    "kv_prefill": st.sampled_from(("dense", "critiprefill", "critiprefill")),
    "kv_prefill_budget": st.sampled_from((16, 24)),
}
# Block sizes are those of the others times this.
BESIDE = (Beside(1), Beside(1), Beside(1, window=6), Beside(2, window=9))
SETTINGS_OF_REQUESTS = st.fixed_dictionaries({}, optional=CHOICES)


@st.composite
def settings_of_servers(draw: st.DrawFn) -> Settings:
    block_size = draw(st.sampled_from((4, 8)))
    window = draw(st.integers(1, 10))
    entries = window + block_size + draw(st.sampled_from((0, 1, 7, 24)))
    method = draw(st.sampled_from(("adakv", "layer-probe", "layer-keydiff", "random", "none")))
    context = draw(st.sampled_from((None, None, 80)))
    decode_budget = draw(st.sampled_from((0, entries)))
    allow_override = draw(st.sampled_from((OVERRIDE_NAMES, BUT_PREFILL, *SOME_OVERRIDES)))
    if method == "none":  # otherwise nobody would ever drop anything, and the server be stock
        allow_override = OVERRIDE_NAMES
    prompt_interval = draw(st.sampled_from((0, 0, 10, 17)))
    prefill = draw(st.sampled_from(("dense", "dense", "critiprefill")))
    if method != "none" and draw(st.integers(0, 7)) == 0:  # a pool smaller than a request may be
        context, decode_budget, allow_override = None, entries, ()
        prompt_interval = prompt_interval or 10
    if prompt_interval:
        prefill = "dense"
    is_sparse = prefill != "dense" or "prefill" in allow_override
    # What keeps states prefills densely.
    beside = None if is_sparse else draw(st.sampled_from((None, None, *BESIDE)))
    if beside is not None:
        beside = replace(beside, block_size=block_size * beside.block_size)
    max_num_seqs = draw(st.integers(2, 6))
    return Settings(
        block_size=block_size,
        num_spare_blocks=draw(st.integers(0, 16)),
        eviction=EvictionConfig(
            method=method,
            window=window,
            budget=draw(st.sampled_from((entries, entries, entries, 0.3))),
            context=context,
            prompt_interval=prompt_interval,
            least=draw(st.sampled_from((0, 30))),
            decode_budget=decode_budget,
            decode_interval=draw(st.sampled_from((10, 12, 17))),
            allow_override=allow_override,
            prefill=prefill,
            prefill_budget=16,
            prefill_segment=SEGMENT,
            prefill_block=8,
            prefill_dense_until=draw(st.sampled_from((0, 32))),
            prefill_dense_layers=draw(st.integers(0, 1)),
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(SEGMENT + max_num_seqs if is_sparse else 8, 200)),
        long_prefill_token_threshold=0 if is_sparse else draw(st.sampled_from((0, 0, 12))),
        policy=draw(st.sampled_from(("fcfs", "fcfs", "priority"))),
        async_scheduling=draw(st.booleans()),
        enable_prefix_caching=draw(st.sampled_from((True, True, True, False))),
        scheduler_reserve_full_isl=draw(st.booleans()),
        page_size=draw(st.sampled_from((None, None, 4))),
        beside=beside,
    )


class BlockAccounting(RuleBasedStateMachine):
    """Arrivals, steps, stops, aborts, preemptions and resets in any order."""

    seen: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.server: Server | None = None
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def start(self, settings: Settings, seed: int) -> None:
        self.server = Server(settings, seed, self.seen)
        self.seen["servers"] += 1

    def pick(self, index: int) -> str:
        names = list(self.server.unfinished)
        return names[index % len(names)]

    def length(self, budget: int | float, border: int, blocks: int, beside: int) -> int:
        """Lengths at and next to every border: block multiples, the window, the budget."""
        window, block_size = self.server.settings.eviction.window, self.server.settings.block_size
        entries = budget if isinstance(budget, int) else 4 * block_size
        borders = (0, window, entries, entries + window, entries + block_size)
        length = borders[border] + blocks * block_size + beside
        return max(1, min(length, MAX_MODEL_LEN - 1))

    def text(self, source: int, length: int, keep: int) -> list[int]:
        """A prompt: shared with others, new, or going on where an earlier answer ended."""
        texts = self.server.texts
        own = [-(10_000 * (len(self.server.all) + 1) + i) for i in range(length)]
        if source == 0:
            return own
        if source <= 3:
            shared = [-(100 * source + 1_000_000 + i) for i in range(length)]
        else:
            shared = texts[source % len(texts)][:length] if texts else []
        return shared[: length - keep] + own[: length - len(shared[: length - keep])]

    @precondition(lambda self: len(self.server.unfinished) < MAX_UNFINISHED)
    @rule(
        source=st.integers(0, 8),
        border=st.integers(0, 4),
        blocks=st.integers(0, 14),
        beside=st.integers(-1, 1),
        keep=st.sampled_from((0, 0, 1, 9, 40)),
        max_tokens=st.integers(1, 70),
        samples=st.sampled_from((1, 1, 1, 2, 3)),
        priority=st.integers(0, 2),
        extra_args=SETTINGS_OF_REQUESTS,
    )
    def arrive(
        self,
        source: int,
        border: int,
        blocks: int,
        beside: int,
        keep: int,
        max_tokens: int,
        samples: int,
        priority: int,
        extra_args: dict[str, Any],
    ) -> None:
        server = self.server.settings.eviction
        try:
            request_config(server, extra_args)
        except RequestError:  # comes all the same, by a way that we do not know
            self.seen["settings refused"] += 1
        eviction = own_eviction(server, extra_args, max_tokens)
        length = self.length(eviction.budget, border, blocks, beside)
        prompt = self.text(source, length, keep)
        for _ in range(samples):
            self.server.add(prompt, max_tokens, priority, extra_args)

    @precondition(lambda self: len(self.server.unfinished) < MAX_UNFINISHED - 2)
    @rule(
        source=st.integers(0, 1),
        context=st.sampled_from((64, 64, 64, 90)),
        questions=st.lists(st.integers(0, 30), min_size=1, max_size=3),
        max_tokens=st.sampled_from((1, 2, 9, 30)),
        method=st.sampled_from((None, None, None, "adakv-perturb", "layer-probe", "knorm")),
        budget=st.sampled_from((None, None, None, 0.4)),
    )
    def ask(
        self,
        source: int,
        context: int,
        questions: list[int],
        max_tokens: int,
        method: str | None,
        budget: float | None,
    ) -> None:
        """Several who ask at once about one of the few contexts that everybody asks about."""
        given = {
            "kv_eviction_context": context,
            "kv_eviction": method,
            "kv_eviction_budget": budget,
        }
        text = [-(100 * source + 2_000_000 + i) for i in range(context)]
        for question in questions:
            own = [-(10_000 * (len(self.server.all) + 1) + i) for i in range(question)]
            extra_args = {key: value for key, value in given.items() if value is not None}
            self.asked.append((self.server.add(text + own, max_tokens, 0, extra_args), extra_args))

    @precondition(lambda self: len(self.server.unfinished) < 4 and len(self.server.all) % 3 == 0)
    @rule(
        length=st.integers(1, 60),
        max_tokens=st.integers(40, 70),
        num_steps=st.integers(10, 40),
        again=st.booleans(),
        method=st.sampled_from((None, "adakv-perturb", "layer-keydiff")),
    )
    def generate(
        self, length: int, max_tokens: int, num_steps: int, again: bool, method: str | None
    ) -> None:
        """A long answer, perhaps interrupted on the way."""
        own = [-(10_000 * (len(self.server.all) + 1) + i) for i in range(length)]
        extra_args: dict[str, Any] = {"kv_eviction_decode_budget": 18}
        if method is not None:
            extra_args["kv_eviction"] = method
        self.server.add(own, max_tokens, 0, extra_args)
        for _ in range(num_steps):
            self.server.step(64)
        if again:
            self.reset_prefix_cache(running=True)

    @precondition(lambda self: self.asked and len(self.server.unfinished) < MAX_UNFINISHED)
    @rule(index=st.integers(-3, -1), question=st.integers(0, 12), num_steps=st.integers(0, 12))
    def ask_again(self, index: int, question: int, num_steps: int) -> None:
        """The next turn of a conversation, the last answer perhaps still under way."""
        for _ in range(num_steps):
            self.server.step(64)
        request_id, extra_args = self.asked[max(index, -len(self.asked))]
        before = self.server.all[request_id]
        own = [-(10_000 * (len(self.server.all) + 1) + i) for i in range(question)]
        prompt = (before.prompt + before.received + own)[: MAX_MODEL_LEN - 10]
        self.asked.append((self.server.add(prompt, 9, 0, extra_args), extra_args))

    @rule(token_budget=st.integers(1, 200))
    def step(self, token_budget: int) -> None:
        self.server.step(token_budget)

    @rule(num_steps=st.integers(2, 24), token_budget=st.sampled_from((5, 16, 64, 200)))
    def steps(self, num_steps: int, token_budget: int) -> None:
        for _ in range(num_steps):
            self.server.step(token_budget)

    @precondition(lambda self: self.server.unfinished)
    @rule(index=st.integers(0, MAX_UNFINISHED), between=st.booleans())
    def abort(self, index: int, between: bool) -> None:
        request_id = self.pick(index)
        if between:
            self.server.step(64, lambda: self.server.abort(request_id))
        else:
            self.server.abort(request_id)

    @precondition(lambda self: self.server.unfinished)
    @rule(index=st.integers(0, MAX_UNFINISHED))
    def stop(self, index: int) -> None:
        self.server.unfinished[self.pick(index)].stops = True

    @rule(running=st.booleans())
    def reset_prefix_cache(self, running: bool) -> None:
        self.server.scheduler.reset_prefix_cache(reset_running_requests=running)
        self.server.seen["resets"] += 1

    @rule()
    def shuffle(self) -> None:
        self.server.worker.shuffle()

    def teardown(self) -> None:
        # A step that failed is not to be hidden by what fails in its wake.
        if self.server is not None and not self.server.in_step:
            self.server.drain()
            worker = self.server.worker
            self.seen["completions"] += worker.num_completions
            self.seen["reads of retained entries"] += worker.num_headwise
            self.seen["pools packed"] += worker.num_pools
            self.seen["requests cut together"] += worker.num_together
            self.seen["different settings in a batch"] += worker.num_mixed
            self.seen["windows in several chunks"] += worker.num_windows_in_chunks
            self.seen["rounds"] += worker.num_rounds
            self.seen["cuts in prompts"] += worker.num_in_prompts
            self.seen["pools smaller than a request"] += self.server.settings.is_bounded
            self.seen["scores kept"] += worker.num_scores_kept
            self.seen["states found"] += worker.num_states_found
            self.seen["states found and more"] += worker.num_found_with_more
            self.seen["states cut again"] += worker.num_to_be_cut_again
            self.seen["sparse segments"] += worker.num_segments
            self.seen["hits in sparse parts"] += worker.num_sparse_hits
            self.seen["read beside"] += worker.bystander.num_read if worker.bystander else 0
            is_split = worker.sizes.page < worker.sizes.block
            self.seen["pages of larger blocks packed"] += is_split and worker.num_completions


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM logs every reset of the prefix cache."""
    monkeypatch.setattr(logging.getLogger("vllm.v1.core.block_pool"), "disabled", True)


def run(
    num_servers: int,
    seen: Counter[str],
    servers: st.SearchStrategy[Settings] | None = None,
    without: Sequence[str] = (),
    **changes: Any,
) -> None:
    """Runs the machine on a number of servers and counts what it sees.

    Args:
        num_servers: Servers in all.
        seen: Takes the counts.
        servers: What is drawn; None for servers of any settings.
        without: Names of rules that are left out.
        changes: Of Hypothesis's settings.
    """
    start = initialize(
        settings=settings_of_servers() if servers is None else servers, seed=st.integers(0, 2**16)
    )
    rules = dict.fromkeys(without) | {"start": start(BlockAccounting.start), "seen": seen}
    machine = type("Machine", (BlockAccounting,), rules)
    changed = settings(PROFILE, max_examples=num_servers, **changes)
    run_state_machine_as_test(machine, settings=changed)

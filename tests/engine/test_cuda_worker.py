"""The CUDA worker: which request a row is, reports, memory."""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from tests.engine import choice_memory
from tests.engine.test_request import message
from tests.plans import planned
from vllm_kvselect.config import CONFIG_KEY, ConfigError, EvictionConfig
from vllm_kvselect.engine.cuda import worker as cuda_worker
from vllm_kvselect.engine.cuda.flash_attention import HeadwiseFlashAttentionMetadataBuilder
from vllm_kvselect.engine.cuda.graph_queries import GraphQueries
from vllm_kvselect.engine.cuda.reserve import choice_bytes
from vllm_kvselect.engine.cuda.tables import HeadwiseTables
from vllm_kvselect.engine.cuda.worker import EvictionGPUWorker
from vllm_kvselect.engine.drop.request import LiveRequests, Request
from vllm_kvselect.engine.drop.state import Made, RetentionState
from vllm_kvselect.engine.scheduler.spec import HeadwiseSpec
from vllm_kvselect.engine.step.reports import Reporter
from vllm_kvselect.kernels.base import REFERENCES

BLOCK_SIZE = 16
EVICTION = EvictionConfig(method="adakv", budget=64, window=16)


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker without a device: what vLLM's worker would do is looked at in place of done."""
    made = object.__new__(EvictionGPUWorker)
    made._contexts = None
    made._eviction, made._requests = EVICTION, LiveRequests(EVICTION, BLOCK_SIZE)
    made._started, made._states, made._report_to_send = [], [], None
    made._reporter = Reporter(made._requests, made._states, says_plans=False)
    made._row_ids, made._is_dummy = [], False
    made.model_runner = SimpleNamespace(decode_query_len=1)
    monkeypatch.setattr(Worker, "execute_model", lambda *_: None)
    return made


@pytest.mark.parametrize("is_v2", [False, True])
def test_rows_of_both_model_runners_have_their_requests(
    is_v2: bool, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.use_v2_model_runner = is_v2
    worker.model_runner = SimpleNamespace(
        decode_query_len=3, input_batch=SimpleNamespace(req_ids=["b", "a"])
    )
    lengths = {"a": 200, "b": 30}  # V2 puts the shorter chunk first
    step = message(*((*each, None) for each in lengths.items()), num_scheduled_tokens=lengths)
    worker.execute_model(step)
    found = worker._requests_of(SimpleNamespace(num_reqs=4))
    assert found[:2] == [worker._requests["b"], worker._requests["a"]]
    assert [prompt.next_cut for prompt in found[2:]] == [None, None]  # padding
    assert worker._requests_of(SimpleNamespace(num_reqs=1)) == found[:1]
    made_up: list[Any] = []
    look = lambda _: made_up.extend(worker._requests_of(SimpleNamespace(num_reqs=2)))  # noqa: E731
    monkeypatch.setattr(Worker, "execute_dummy_batch", look)
    worker.execute_dummy_batch()
    assert [request.plan.is_stock for request in made_up] == [True, True]
    assert worker._requests_of(SimpleNamespace(num_reqs=4)) == found


@pytest.mark.parametrize("wrapped", [False, True])
def test_model_runner_v2_sends_reports_with_the_output(
    wrapped: bool, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = Request(planned(200, BLOCK_SIZE, EVICTION))
    cut = prompt.plan.cuts[0]
    freed = cut.first_packed  # pages are blocks
    stopwatch = SimpleNamespace(seconds=0.25)
    state = SimpleNamespace(
        completed=[Made(prompt, cut, freed, freed)], stopwatch=stopwatch, num_evicted=1
    )
    worker._states.append(state)
    worker.use_v2_model_runner = True
    result = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    output = SimpleNamespace(model_runner_output=result) if wrapped else result
    monkeypatch.setattr(Worker, "sample_tokens", lambda *_: output)
    worker.execute_model(message())
    assert worker.sample_tokens(None) is output
    stats = result.kv_connector_output.kv_connector_stats.data[CONFIG_KEY]
    assert stats["prompts"] == [[200, freed, freed]]
    assert stats["selection_seconds"] == 0.25
    result.kv_connector_output = None
    worker.execute_model(message())
    worker.sample_tokens(None)
    assert result.kv_connector_output is None
    stopwatch.seconds = 0.75  # the device has come to the end of another prompt
    worker.execute_model(message())
    worker.sample_tokens(None)
    stats = result.kv_connector_output.kv_connector_stats.data[CONFIG_KEY]
    assert (stats["prompts"], stats["selection_seconds"]) == ([], 0.5)


def test_kernels_that_do_not_fit_a_card_are_refused_with_what_to_do(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = pytest.importorskip("triton.runtime.errors")

    def too_large(*_: Any) -> None:
        raise errors.OutOfResources(133120, 101376, "shared memory")

    monkeypatch.setattr(cuda_worker, "warm_up", too_large)
    builder = object.__new__(HeadwiseFlashAttentionMetadataBuilder)
    monkeypatch.setattr(EvictionGPUWorker, "_builders", [builder])
    worker.model_config = SimpleNamespace(get_head_size=lambda: 256, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"256 channels.*Required: 133120.*or in bfloat16"):
        inspect.unwrap(EvictionGPUWorker.compile_or_warm_up_model)(worker)


@pytest.fixture
def spec(worker: Any, monkeypatch: pytest.MonkeyPatch) -> HeadwiseSpec:
    """The cache of an 8B Llama, of which the worker finds 40 GiB of memory left."""
    spec = HeadwiseSpec(
        block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16, eviction=EVICTION
    )
    monkeypatch.setattr(
        EvictionGPUWorker, "get_kv_cache_spec", lambda _: {str(i): spec for i in range(32)}
    )
    monkeypatch.setattr(Worker, "determine_available_memory", lambda _: 40 * 2**30)
    worker.model_config = SimpleNamespace(
        max_model_len=32768, dtype=torch.bfloat16, get_num_attention_heads=lambda _: 32
    )
    worker.vllm_config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=256),
        parallel_config=None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, max_cudagraph_capture_size=512
        ),
    )
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=None)
    return spec


def test_memory_beside_the_cache_is_reserved_unless_the_user_gave_a_size(
    worker: Any, spec: HeadwiseSpec
) -> None:
    left = worker.determine_available_memory()
    # What will be allocated beside a cache that fills what is left, on a device without memory.
    state = RetentionState(left // (32 * spec.page_size_bytes), 32, 8, "meta")
    tables = HeadwiseTables(state, 256, 32768, 16, REFERENCES)
    scores = torch.empty(2**24, device="meta")
    moved = torch.empty(2**28, dtype=torch.uint8, device="meta")
    kept = [state.offsets, moved, scores, *vars(tables).values()]
    least = sum(part.nbytes for part in kept if isinstance(part, torch.Tensor))
    # The rest is for what else is said of entries while those of a pass are chosen from.
    assert least < 40 * 2**30 - left < 3 * least
    worker.cache_config.kv_cache_memory_bytes = 40 * 2**30
    assert worker.determine_available_memory() == 40 * 2**30


def test_of_blocks_with_room_for_a_state_pages_are_reserved_for(
    worker: Any, spec: HeadwiseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = worker.determine_available_memory()
    padded = 34 * spec.page_size_bytes + 2**12
    hybrid = replace(spec, block_size=34 * 16, page_size=16, page_size_padded=padded)
    monkeypatch.setattr(
        EvictionGPUWorker, "get_kv_cache_spec", lambda _: {str(i): hybrid for i in range(32)}
    )
    assert worker.determine_available_memory() == left


def test_a_start_up_plan_leaves_the_reserve_free(
    worker: Any, spec: HeadwiseSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM puts what it measured at an earlier start where a user would."""
    first = worker.determine_available_memory()

    def planned(worker: Any) -> int:
        worker.cache_config.kv_cache_memory_bytes = 40 * 2**30
        return 40 * 2**30

    monkeypatch.setattr(Worker, "determine_available_memory", planned)
    assert worker.determine_available_memory() == first


MEASURED = (
    "adakv-perturb",
    "defensivekv",
    "layer-defensivekv",
    "knorm",
    "keydiff",
    "thetakv",
    "ada-pyramidkv-perturb",
    "layer-probe",
    "r-kv",
)


@pytest.mark.parametrize("method", MEASURED)
def test_what_a_choice_takes_is_what_is_reserved_for_its_method(
    method: str, spec: HeadwiseSpec
) -> None:
    num_tokens = 16384 if method == "r-kv" else 65536  # r-kv compares each with all, in parts
    taken = choice_memory.choice_bytes(method, num_tokens, 8, 4, 128, 4096, 32)
    reserved = choice_bytes([method], spec, 32, num_tokens, 4, 32, torch.bfloat16)
    assert taken <= reserved
    assert reserved <= 2.5 * taken


def test_what_requests_of_one_pass_take_is_bounded(spec: HeadwiseSpec) -> None:
    """Many short prompts fall due at once, or one long one."""
    sizes = 4, 32, torch.bfloat16
    alone, many, most, long = (
        choice_bytes(["adakv"], spec, 32, num_tokens, *sizes, num_requests)
        for num_tokens, num_requests in ((1024, 1), (1024, 8), (1024, 1000), (131072, 1000))
    )
    assert alone < many < most
    assert most < long
    # What one long prompt takes does not grow with the others, but for their windows' queries.
    assert long < 1.2 * choice_bytes(["adakv"], spec, 32, 131072, *sizes, 1)


@pytest.mark.parametrize(
    ("values", "num_requests"),
    [
        ({"decode_budget": 512}, 256),
        # As many as hold more than their budget each, together with the queries of a window.
        ({"decode_budget": 8192}, 39),
        ({"decode_budget": 8192, "allow_override": ("decode_budget",)}, 256),
        ({"allow_override": ("decode_budget",)}, 256),
        ({"prompt_interval": 512}, 256),
        ({"allow_override": ("prompt_interval",)}, 256),
    ],
)
def test_memory_is_reserved_for_the_queries_that_rounds_look_through(
    values: dict[str, Any], num_requests: int, worker: Any, spec: HeadwiseSpec
) -> None:
    without = worker.determine_available_memory()
    worker._eviction = EvictionConfig(**{**EVICTION.model_dump(), **values})
    sizes = (32, 256, 32, 128, torch.bfloat16, torch.device("meta"))
    (buffer,) = (p for p in vars(GraphQueries(*sizes)).values() if isinstance(p, torch.Tensor))
    window = torch.empty(32, EVICTION.window, 32, 128, dtype=torch.bfloat16, device="meta")
    expected = buffer.nbytes + num_requests * window.nbytes
    assert without - worker.determine_available_memory() == expected
    worker.vllm_config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    assert without - worker.determine_available_memory() == expected - buffer.nbytes


def test_memory_is_reserved_for_the_numbers_that_rounds_remember(
    worker: Any, spec: HeadwiseSpec
) -> None:
    reserved = []
    for method in ("ada-probe", "snapkv"):
        values = {"method": method, "decode_budget": 512}
        worker._eviction = EvictionConfig(**{**EVICTION.model_dump(), **values})
        reserved.append(40 * 2**30 - worker.determine_available_memory())
    # A float32 number beside 128 channels of a key and a value in bfloat16. Both choose alike.
    of_both = 2 * 128 * 2 + 4
    assert reserved[0] - reserved[1] == -(-40 * 2**30 * 4 // of_both)

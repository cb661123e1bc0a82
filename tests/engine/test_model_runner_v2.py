"""Model runner V2, the default from vLLM 0.33 on: our worker and backends on what it hands over."""

import inspect
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu import async_utils
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from tests.engine.cuda_layers import MAX_NUM_SEQS
from tests.engine.model_runner_v2 import LayersOfV2
from tests.engine.test_cuda_backend import (  # noqa: F401 (fixtures)
    TRITON,
    Replays,
    backend,
    make_layers,
    mixed_steps,
    stand_ins,
)
from vllm_kvselect.kernels import cuda


@pytest.mark.parametrize("method", ["adakv-perturb", "knorm", "layer-defensivekv"])
def test_every_step_is_that_of_the_oracle(method: str, backend: Any) -> None:  # noqa: F811
    layers = make_layers(backend, method, cuda.KERNELS, layers_class=LayersOfV2)
    mixed_steps(layers)


def test_a_graph_of_a_decode_step_replays_for_fewer_rows(
    backend: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = make_layers(backend, kernels=cuda.KERNELS, graphs=True, layers_class=LayersOfV2)
    replays = Replays(backend, layers, MAX_NUM_SEQS, monkeypatch)
    if backend is TRITON:
        assert layers.seq_lens.eq(1).all()  # as vLLM captures with this backend
    long, short, other = (layers.request(n, n + 40) for n in (100, 20, 94))
    layers.step((long, 100), (short, 20))
    for rows in ([long, short], [short, long], [long], [short]):
        replays.step(*((request, 1) for request in rows))
    layers.step((other, 94), (long, 1), (short, 1))
    for _ in range(3):  # one of them comes to its next block
        replays.step((short, 1), (other, 1), (long, 1))


def test_a_report_added_to_an_output_under_way_is_what_arrives() -> None:
    output = object.__new__(async_utils.AsyncOutput)
    output.model_runner_output = ModelRunnerOutput(req_ids=[], req_id_to_index={})
    report = output.model_runner_output.kv_connector_output = KVConnectorOutput()
    # What is salvaged of a step that fails, from 0.33 on.
    if hasattr(output, "get_kv_connector_output"):
        assert output.get_kv_connector_output() is report
    # The last word on it is said before `sample_tokens` returns the output.
    sample = inspect.getsource(GPUModelRunner.sample_tokens)
    said, returned = (sample.rindex(x) for x in (".kv_connector_output =", "return async_output"))
    assert said < returned

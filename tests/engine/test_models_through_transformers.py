"""Models that vLLM runs through transformers: what they give methods, and what they lack."""

from pathlib import Path

import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM
from vllm import LLM
from vllm.outputs import CompletionOutput

from tests.engine.random_models import SHAPE
from tests.engine.test_unreadable_projections import (  # noqa: F401 (fixture)
    PROMPT,
    engine_in_this_process,
    params,
)
from vllm_kvselect.config import ConfigError


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a kind that no other test makes: vLLM changes its class for the rest of a process."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("arcee")
    config = ArceeConfig(num_hidden_layers=4, **SHAPE)
    ArceeForCausalLM(config).save_pretrained(folder)
    return folder


def start(folder: Path, model_impl: str, method: str) -> LLM:
    return LLM(
        str(folder),
        model_impl=model_impl,
        dtype="float32",
        max_model_len=512,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=2**24,
        additional_config={"kv_eviction": {"method": method, "budget": 96}},
    )


def answer(folder: Path, model_impl: str, method: str) -> CompletionOutput:
    """Eight tokens after a prompt of which half is dropped, with their likelihoods."""
    llm = start(folder, model_impl, method)
    try:
        sampling = params(None, max_tokens=8)
        sampling.logprobs = 0
        (found,) = llm.generate(PROMPT, sampling, use_tqdm=False)
        return found.outputs[0]
    finally:
        llm.llm_engine.engine_core.shutdown()


def test_their_output_projections_are_those_of_vllms_own_models(arcee: Path) -> None:
    ours = answer(arcee, "vllm", "adakv-perturb")
    theirs = answer(arcee, "transformers", "adakv-perturb")
    assert theirs.token_ids == ours.token_ids
    assert theirs.cumulative_logprob == pytest.approx(ours.cumulative_logprob, abs=1e-3)


def test_what_needs_their_rotation_is_refused_with_a_sentence(arcee: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        start(arcee, "transformers", "layer-probe")
    reason, _, others = str(caught.value).partition("; choose one of ")
    assert reason.endswith(
        "with TransformersForCausalLM: in model.layers.0.self_attn, ArceeAttention cannot be run "
        "alone, so that it cannot be tried how it rotates queries"
    )
    assert others.endswith("the best without it is --kv-eviction layer-defensivekv")

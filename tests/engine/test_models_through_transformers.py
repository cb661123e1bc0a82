"""Models that vLLM runs through transformers: what they give methods, and what they lack."""

from pathlib import Path

import pytest
import torch
from transformers import ArceeConfig, ArceeForCausalLM

from tests.engine.conftest import Answer, EngineFactory
from tests.engine.random_models import SHAPE
from tests.engine.test_unreadable_projections import PROMPT
from vllm_kvselect.config import ConfigError


@pytest.fixture(scope="module")
def arcee(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a kind that no other test makes: vLLM changes its class for the rest of a process."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("arcee")
    config = ArceeConfig(num_hidden_layers=4, **SHAPE)
    ArceeForCausalLM(config).save_pretrained(folder)
    return folder


def test_their_output_projections_are_those_of_vllms_own_models(
    start_small: EngineFactory, arcee: Path
) -> None:
    answers: list[Answer] = []
    for kind in ("vllm", "transformers"):
        with start_small({}, model=arcee, model_impl=kind) as engine:
            answers += engine.generate([PROMPT], 8)  # half of the prompt is dropped
    assert answers[0] == answers[1]


def test_what_needs_their_rotation_is_refused_with_a_sentence(
    start_small: EngineFactory, arcee: Path
) -> None:
    theirs = {"model": arcee, "model_impl": "transformers"}
    with pytest.raises(ConfigError) as caught, start_small({"method": "layer-probe"}, **theirs):
        pass
    reason, _, others = str(caught.value).partition("; choose one of ")
    assert reason.endswith(
        "with TransformersForCausalLM: in model.layers.0.self_attn, ArceeAttention cannot be run "
        "alone, so that it cannot be tried how it rotates queries"
    )
    assert others.endswith("the best without it is --kv-eviction layer-defensivekv")

"""Models with other layers beside attention: only those that attend are captured and scored."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.engine.random_hybrids import falcon_h1, granite_h, lfm2, nemotron_h, qwen3_next
from tests.oracle import kvzip as oracle
from vllm_kvselect.offline.attention import attending_layers, keeps_states
from vllm_kvselect.offline.capture import capture, continue_prompt
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.kvzip import Replay, chunks, kvzip_scores
from vllm_kvselect.offline.rotations import UnknownRotation

FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], list[int]]] = {
    "lfm2": (lfm2, [2, 5]),
    "granite": (granite_h, [1, 3]),
    "falcon": (falcon_h1, [0, 1]),
    "nemotron": (nemotron_h, [2, 5]),
    "qwen3_next": (qwen3_next, [2, 5]),
}
CHUNK_SIZE = 17


@pytest.fixture(scope="module", params=FAMILIES)
def hybrid(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(0)
    make, layers = FAMILIES[request.param]
    model = make().eval()
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    assert attending_layers(model) == layers
    assert keeps_states(model)
    return model


def test_scores_are_the_oracles_of_what_attends(
    hybrid: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, token_ids: list[int]
) -> None:
    context, replay = token_ids[:40], Replay(CHUNK_SIZE, answer_start="\n")
    layers = capture(hybrid, [*context, 5, 6])
    scores = kvzip_scores(hybrid, tokenizer, layers, context, replay)
    assert len(layers) == len(scores) == 2
    for chunk in chunks(tokenizer, context, replay):
        part = range(chunk.start, chunk.stop)
        read = {*range(min(4, chunk.start)), *part}
        for index, layer in enumerate(capture(hybrid, context + chunk.token_ids)):
            expected = oracle.kvzip_scores(
                layer.query.tolist(), layer.key.tolist(), layer.scale, len(context), part, read
            )
            found = scores[index, :, chunk.start : chunk.stop]
            torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=1e-3)


def test_rotations_are_known(hybrid: PreTrainedModel, token_ids: list[int]) -> None:
    for layer in capture(hybrid, token_ids):
        assert not isinstance(layer.rotation, UnknownRotation), layer.rotation


def test_nothing_is_continued_off_the_engine(hybrid: PreTrainedModel, token_ids: list[int]) -> None:
    layers = capture(hybrid, token_ids)
    retained = torch.ones(len(layers), len(layers[0].key), 20, dtype=torch.bool)
    with pytest.raises(EvaluationError, match=r"keeps states .*--through engine"):
        continue_prompt(hybrid, layers, token_ids[20:30], retained)

"""Models with other layers beside attention: only those that attend are captured and scored."""

from collections.abc import Callable

import pytest
import torch
from papers.continuation import continue_prompt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.engine.random_hybrids import falcon_h1, granite_h, lfm2, nemotron_h, qwen3_next
from tests.oracle import kvzip as oracle
from vllm_kvselect.offline.attention import attending_layers, attention_replaced, keeps_states
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.kvzip import chunks, kvzip_scores
from vllm_kvselect.offline.rotations import UnknownRotation

FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], list[int]]] = {
    "lfm2": (lfm2, [2, 5]),
    "granite": (granite_h, [1, 3]),
    "falcon": (falcon_h1, [0, 1]),
    "nemotron": (nemotron_h, [2, 5]),
    "qwen3_next": (qwen3_next, [2, 5]),
}
CHUNK_SIZE = 17
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


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
    context = token_ids[:40]
    layers = capture(hybrid, [*context, 5, 6])
    scores = kvzip_scores(hybrid, tokenizer, layers, context, CHUNK_SIZE)
    assert len(layers) == len(scores) == 2
    for chunk in chunks(tokenizer, context, CHUNK_SIZE):
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


def test_whole_cache_continues_as_the_model(hybrid: PreTrainedModel, token_ids: list[int]) -> None:
    layers = capture(hybrid, token_ids)
    prompt, following = token_ids[:20], token_ids[20:30]
    everything = torch.ones(len(layers), len(layers[0].key), len(prompt), dtype=torch.bool)
    continued = continue_prompt(hybrid, layers, prompt, following, everything)
    with torch.no_grad():
        expected = hybrid(torch.tensor([prompt + following]), output_hidden_states=True)
    attending = [expected.hidden_states[i] for i in [*attending_layers(hybrid), -1]]
    hidden = torch.cat(attending)[:, len(prompt) :]
    torch.testing.assert_close(continued.hidden_states, hidden, **CLOSE)
    torch.testing.assert_close(continued.logits, expected.logits[0, len(prompt) :], **CLOSE)


def test_following_tokens_see_what_is_retained(
    hybrid: PreTrainedModel, token_ids: list[int]
) -> None:
    """Against attention written out query by query, in a whole run of the model."""
    layers = capture(hybrid, token_ids)
    prompt, following = token_ids[:20], token_ids[20:30]
    generator = torch.Generator().manual_seed(1)
    shape = (len(layers), len(layers[0].key), len(prompt))
    retained = torch.rand(shape, generator=generator) < 0.4

    def attend(
        index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        output = torch.empty_like(query)
        group = query.shape[1] // key.shape[1]
        for head in range(query.shape[1]):
            of = head // group
            for position in range(query.shape[2]):
                seen = list(range(position + 1))
                if position >= len(prompt):
                    kept = retained[index, of].nonzero()[:, 0].tolist()
                    seen = [*kept, *range(len(prompt), position + 1)]
                weights = (scale * key[0, of, seen] @ query[0, head, position]).softmax(0)
                output[0, head, position] = weights @ value[0, of, seen]
        return output

    with torch.no_grad(), attention_replaced(hybrid, attend):
        expected = hybrid(torch.tensor([prompt + following])).logits[0, len(prompt) :]
    continued = continue_prompt(hybrid, layers, prompt, following, retained)
    torch.testing.assert_close(continued.logits, expected, **CLOSE)

import copy

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.offline.conftest import NUM_KV_HEADS, NUM_LAYERS
from tests.oracle import kvzip as oracle
from vllm_kvselect.offline import kvzip
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.kvzip import chunks, kvzip_scores

CHUNK_SIZE = 17


@pytest.fixture(scope="module")
def llama64(llama: PreTrainedModel) -> PreTrainedModel:
    return copy.deepcopy(llama).double()


@pytest.fixture
def context(token_ids: list[int]) -> list[int]:
    return token_ids[:40]  # two chunks and a shorter one


@pytest.mark.parametrize("block_elements", [1, 2000, 2**24])
def test_scores_are_the_oracles(
    block_elements: int,
    llama64: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    context: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kvzip, "_BLOCK_ELEMENTS", block_elements)
    layers = capture(llama64, [*context, 5, 6])
    scores = kvzip_scores(llama64, tokenizer, layers, context, CHUNK_SIZE)
    assert scores.shape == (NUM_LAYERS, NUM_KV_HEADS, len(context))
    for chunk in chunks(tokenizer, context, CHUNK_SIZE):
        part = range(chunk.start, chunk.stop)
        read = {*range(min(4, chunk.start)), *part}
        # Nothing stands between the replay and the context, so one run gives both.
        for index, layer in enumerate(capture(llama64, context + chunk.token_ids)):
            expected = oracle.kvzip_scores(
                layer.query.tolist(), layer.key.tolist(), layer.scale, len(context), part, read
            )
            found = scores[index, :, chunk.start : chunk.stop]
            torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


def test_every_chunk_is_asked_for_and_repeated(
    tokenizer: PreTrainedTokenizerBase, context: list[int]
) -> None:
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = None  # an answer begins on a line of its own then
    found = list(chunks(tokenizer, context, CHUNK_SIZE))
    assert [(chunk.start, chunk.stop) for chunk in found] == [(0, 17), (17, 34), (34, 40)]
    first, second, _ = (tokenizer.decode(chunk.token_ids) for chunk in found)
    repeated = [tokenizer.decode(context[chunk.start : chunk.stop]) for chunk in found]
    assert first == "\n\nRepeat the previous context exactly.\n" + repeated[0]
    beginning = "\n\nRepeat the part of the previous context exactly, starting with"
    assert second == beginning + tokenizer.decode(context[9:17]) + "\n" + repeated[1]


def test_the_answer_begins_as_in_the_chat_template(
    tokenizer: PreTrainedTokenizerBase, context: list[int]
) -> None:
    (chunk,) = chunks(tokenizer, context)
    text = tokenizer.decode(chunk.token_ids)
    assert text.startswith(
        "\n\nRepeat the previous context exactly.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.endswith(tokenizer.decode(context))

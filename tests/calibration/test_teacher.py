"""What a probe is fitted to: KVzip's score, and what an entry can add to the output."""

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.offline.conftest import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS
from vllm_kvselect.calibration.settings import CalibrationConfig
from vllm_kvselect.calibration.teacher import samples
from vllm_kvselect.offline.capture import capture
from vllm_kvselect.offline.kvzip import kvzip_scores

CONFIG = CalibrationConfig(chunk_size=40)


def norms(model: PreTrainedModel, context: list[int]) -> Iterator[torch.Tensor]:
    """Of each layer, `[num_kv_heads, num_tokens]`, head by head from the weights, in float64."""
    group = NUM_HEADS // NUM_KV_HEADS
    for layer, block in zip(capture(model, context), model.model.layers, strict=True):
        weight = block.self_attn.o_proj.weight.double()
        of_heads = [
            (layer.value[head // group].double() @ columns.T).abs().sum(dim=1)
            for head, columns in enumerate(weight.split(HEAD_SIZE, dim=1))
        ]
        yield torch.stack(of_heads).view(NUM_KV_HEADS, group, -1).mean(dim=1)


def test_the_target_is_the_score_times_the_root_of_the_norm(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, token_ids: list[int]
) -> None:
    scores = kvzip_scores(llama, tokenizer, capture(llama, token_ids), token_ids, CONFIG.chunk_size)
    found = samples(llama, tokenizer, token_ids, CONFIG)
    for (_, target), score, norm in zip(found, scores, norms(llama, token_ids), strict=True):
        torch.testing.assert_close(target.exp(), (score * norm.sqrt()).float(), rtol=1e-5, atol=0)


def test_where_one_layer_has_no_norms_none_has(
    llama: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, token_ids: list[int]
) -> None:
    """Layers are compared with each other; something may stand before a layer's W_O."""
    projection = llama.model.layers[1].self_attn.o_proj
    gate = projection.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 0.5,))
    try:
        layers = capture(llama, token_ids)
        scores = kvzip_scores(llama, tokenizer, layers, token_ids, CONFIG.chunk_size)
        found = [target for _, target in samples(llama, tokenizer, token_ids, CONFIG)]
    finally:
        gate.remove()
    assert [layer.projection is None for layer in layers] == [False, True]
    torch.testing.assert_close(torch.stack(found).exp(), scores)

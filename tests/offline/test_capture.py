import pytest
import torch
from papers.continuation import continue_prompt
from papers.quantities import following_attention, head_outputs
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.offline.conftest import HEAD_SIZE, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS
from vllm_kvselect.offline.capture import Layer, capture
from vllm_kvselect.offline.errors import EvaluationError

TIGHT = {"rtol": 1e-4, "atol": 1e-4}


def projected(model: PreTrainedModel, name: str, token_ids: list[int]) -> list[torch.Tensor]:
    """What transformers' own eager attention gives, `[num_tokens, hidden_size]` a layer."""
    found: list[torch.Tensor] = []
    modules = [module for key, module in model.named_modules() if key.endswith(name)]
    hooks = [
        module.register_forward_hook(lambda _, __, output: found.append(output[0]))
        for module in modules
    ]
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
    model.set_attn_implementation(before)
    for hook in hooks:
        hook.remove()
    return found


def all_heads(layer: Layer) -> torch.Tensor:
    """The layer's output from what was captured, `[num_tokens, hidden_size]`."""
    return head_outputs(layer, following_attention(layer, 0)).sum(dim=0)


def test_captured_layers_give_the_eager_output(
    llama: PreTrainedModel, token_ids: list[int]
) -> None:
    layers = capture(llama, token_ids)
    expected = projected(llama, "self_attn.o_proj", token_ids)
    assert len(layers) == len(expected) == NUM_LAYERS
    for layer, output in zip(layers, expected, strict=True):
        assert layer.query.shape == (len(token_ids), NUM_HEADS, HEAD_SIZE)
        assert layer.key.shape == (NUM_KV_HEADS, len(token_ids), HEAD_SIZE)
        torch.testing.assert_close(all_heads(layer), output, **TIGHT)


def test_output_projection_is_found_by_use_and_its_bias_left_out(token_ids: list[int]) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=max(token_ids) + 1, n_positions=128, n_embd=32, n_layer=2, n_head=4,
        initializer_range=0.5,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    for block in model.transformer.h:
        torch.nn.init.normal_(block.attn.c_proj.bias)
    expected = projected(model, "attn.c_proj", token_ids)
    for index, layer in enumerate(capture(model, token_ids)):
        bias = model.transformer.h[index].attn.c_proj.bias
        torch.testing.assert_close(all_heads(layer) + bias, expected[index], **TIGHT)


def test_model_is_left_as_it_was(llama: PreTrainedModel, token_ids: list[int]) -> None:
    before = llama.config._attn_implementation
    capture(llama, token_ids)
    assert llama.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in llama.modules())


def test_whole_cache_continues_as_the_model(llama: PreTrainedModel, token_ids: list[int]) -> None:
    prompt, following = token_ids[:80], token_ids[80:]
    layers = capture(llama, token_ids)
    everything = torch.ones(NUM_LAYERS, NUM_KV_HEADS, len(prompt), dtype=torch.bool)
    continued = continue_prompt(llama, layers, prompt, following, everything)
    with torch.no_grad():
        expected = llama(torch.tensor([token_ids]), output_hidden_states=True)
    hidden = torch.cat(expected.hidden_states)[:, len(prompt) :]
    torch.testing.assert_close(continued.hidden_states, hidden, **TIGHT)
    torch.testing.assert_close(continued.logits, expected.logits[0, len(prompt) :], **TIGHT)


def test_dropped_entries_are_not_seen(llama: PreTrainedModel, token_ids: list[int]) -> None:
    """Against transformers' eager attention with a mask per head, prompt and rest in one go."""
    num_prompt_tokens, num_tokens = 80, len(token_ids)
    generator = torch.Generator().manual_seed(1)
    of_layer = torch.rand(NUM_KV_HEADS, num_prompt_tokens, generator=generator) < 0.3
    retained = of_layer.expand(NUM_LAYERS, -1, -1)

    visible = torch.ones(NUM_HEADS, num_tokens, num_tokens, dtype=torch.bool).tril()
    for head in range(NUM_HEADS):
        visible[head, num_prompt_tokens:, :num_prompt_tokens] &= of_layer[
            head // (NUM_HEADS // NUM_KV_HEADS)
        ]
    mask = torch.zeros(1, NUM_HEADS, num_tokens, num_tokens).masked_fill(~visible, -1e9)
    before = llama.config._attn_implementation
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        expected = llama(torch.tensor([token_ids]), attention_mask=mask, use_cache=False)
    llama.set_attn_implementation(before)

    layers = capture(llama, token_ids)
    prompt, following = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
    continued = continue_prompt(llama, layers, prompt, following, retained)
    torch.testing.assert_close(
        continued.logits, expected.logits[0, num_prompt_tokens:], rtol=1e-3, atol=1e-4
    )


def test_sliding_windows_are_refused(token_ids: list[int]) -> None:
    config = MistralConfig(
        vocab_size=max(token_ids) + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=16,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(EvaluationError, match="MistralAttention attends with sliding_window"):
        capture(model, token_ids)
    assert model.config._attn_implementation == before


def test_masks_that_are_not_causal_are_refused(token_ids: list[int]) -> None:
    config = Llama4TextConfig(
        vocab_size=max(token_ids) + 1, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_local_experts=1,
        intermediate_size_mlp=16, interleave_moe_layer_step=2, pad_token_id=0, no_rope_layers=[1],
        attention_chunk_size=16,
    )  # fmt: skip
    with pytest.raises(EvaluationError, match="attends with a mask that is not causal"):
        capture(Llama4ForCausalLM(config).eval(), token_ids)


def test_gate_before_the_output_projection_is_refused(
    llama: PreTrainedModel, token_ids: list[int]
) -> None:
    projection = llama.model.layers[1].self_attn.o_proj
    gate = projection.register_forward_pre_hook(lambda _, arguments: (arguments[0] * 0.5,))
    try:
        first, gated = capture(llama, token_ids)
    finally:
        gate.remove()
    assert first.output_projection is first.projection
    with pytest.raises(EvaluationError, match="does not project its attention's output"):
        _ = gated.output_projection

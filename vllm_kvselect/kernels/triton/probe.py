"""What a probe says of tokens, in one pass; `probed_scores` of `vllm_kvselect/scoring/probe.py`.

No key is turned back. A pair (x, y) that was turned by an angle with cosine c and sine s is,
before that, (c x + s y, c y - s x); under weights (u, v) it counts

    c (u x + v y) + s (u y - v x).
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.kernels.triton.selection import rows
from vllm_kvselect.kernels.triton.window_attention import DTYPES
from vllm_kvselect.scoring import probe
from vllm_kvselect.scoring.inputs import ScoringInputs

_TOKENS = 32
"""In a program: 512 programs for 2,048 tokens of 8 heads."""


def probed_scores(inputs: ScoringInputs, first_position: int) -> torch.Tensor:
    """Twin of `probe.probed_scores`; products and sums are float32 throughout."""
    key, value, rotation = inputs.key, inputs.value, inputs.rotation
    if key.dtype not in DTYPES:
        return probe.probed_scores(inputs, first_position)
    assert inputs.probe is not None
    num_kv_heads, num_tokens, head_size = key.shape
    cos = sin = key.new_empty(num_tokens, 0, dtype=torch.float32)
    if rotation is not None:
        cos, sin = (part.contiguous() for part in rotation.rows(first_position, num_tokens))
        assert len(cos) == num_tokens  # the kernel would read beyond the tables
    num_pairs = cos.shape[1]
    rest_size = head_size - 2 * num_pairs
    scores = torch.empty(num_kv_heads, num_tokens, dtype=torch.float32, device=key.device)
    key, value = rows(key), rows(value)
    _probe_kernel[(triton.cdiv(num_tokens, _TOKENS), num_kv_heads)](
        key,
        *key.stride()[:2],
        value,
        *value.stride()[:2],
        inputs.probe.T.float().contiguous(),
        cos,
        sin,
        num_tokens,
        first_position,
        scores,
        HEAD_SIZE=head_size,
        PAIRS=num_pairs,
        INTERLEAVED=rotation is not None and rotation.interleaved,
        PER_TOKEN=probe.PER_TOKEN,
        TOKENS=_TOKENS,
        PAIR_BLOCK=triton.next_power_of_2(max(1, num_pairs)),
        REST_BLOCK=triton.next_power_of_2(max(1, rest_size)),
        VALUE_BLOCK=triton.next_power_of_2(head_size),
    )
    return scores


@triton.jit(do_not_specialize=["num_tokens", "first_position"])
def _probe_kernel(
    key_ptr,
    key_head_stride,
    key_token_stride,
    value_ptr,
    value_head_stride,
    value_token_stride,
    weights_ptr,
    cos_ptr,
    sin_ptr,
    num_tokens,
    first_position,
    scores_ptr,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = tokens < num_tokens
    weights_ptr += head * (2 * HEAD_SIZE + 1)
    pairs = tl.arange(0, PAIR_BLOCK)
    is_pair = pairs < PAIRS
    logarithms = tl.zeros((TOKENS,), tl.float32)
    row = key_ptr + head * key_head_stride + tokens * key_token_stride
    if PAIRS > 0:
        first = pairs * 2 if INTERLEAVED else pairs
        second = first + (1 if INTERLEAVED else PAIRS)
        u, v = (_weights(weights_ptr, first, is_pair), _weights(weights_ptr, second, is_pair))
        x, y = (_vectors(row, first, inside, is_pair), _vectors(row, second, inside, is_pair))
        table = tokens[:, None] * PAIRS + pairs[None, :]
        is_entry = inside[:, None] & is_pair[None, :]
        cos = tl.load(cos_ptr + table, mask=is_entry, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + table, mask=is_entry, other=0.0).to(tl.float32)
        turned = cos * (u * x + v * y) + sin * (u * y - v * x)
        logarithms += tl.sum(turned / (cos * cos + sin * sin), 1)
    if HEAD_SIZE > 2 * PAIRS:
        rest = 2 * PAIRS + tl.arange(0, REST_BLOCK)
        is_rest = rest < HEAD_SIZE
        vectors = _vectors(row, rest, inside, is_rest)
        logarithms += tl.sum(vectors * _weights(weights_ptr, rest, is_rest), 1)
    channels = tl.arange(0, VALUE_BLOCK)
    is_channel = channels < HEAD_SIZE
    row = value_ptr + head * value_head_stride + tokens * value_token_stride
    weight = weights_ptr + HEAD_SIZE
    values = _vectors(row, channels, inside, is_channel)
    logarithms += tl.sum(values * _weights(weight, channels, is_channel), 1)
    logarithms += tl.load(weight + HEAD_SIZE)
    logarithms += (first_position + tokens) * PER_TOKEN
    tl.store(scores_ptr + head * num_tokens + tokens, tl.exp(logarithms), mask=inside)


@triton.jit
def _vectors(row, channels, inside, is_channel):
    """Channels of the tokens' vectors, in float32."""
    mask = inside[:, None] & is_channel[None, :]
    return tl.load(row[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _weights(weight, channels, is_channel):
    """Their weights, one row."""
    return tl.load(weight + channels, mask=is_channel, other=0.0)[None, :]

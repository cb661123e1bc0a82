"""What a probe says of tokens, of all rows; `probe_scores` of `vllm_kvselect/scoring/probe.py`.

No key is turned back. A pair (x, y) that was turned by an angle with cosine c and sine s is,
before that, (c x + s y, c y - s x); under weights (u, v) it counts

    c (u x + v y) + s (u y - v x).
"""

import torch
import triton
import triton.language as tl

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels.triton.paged import CODES, UNSPECIALISED, empty, paged, places_of, read
from vllm_kvselect.scoring import probe
from vllm_kvselect.scoring.held import Held

_TOKENS = 32
"""In a program: 512 programs for 2,048 tokens of 8 heads."""


def probe_scores(held: Held, config: EvictionConfig) -> torch.Tensor:
    """Twin of `scoring.probe.probe_scores`, over rows; products and sums are float32 throughout."""
    constants = held.paged
    assert constants.probes is not None
    cos, sin = constants.tables
    num_pairs, head_size = cos.shape[2], constants.memory.shape[2] // 2
    scores = empty(held) if held.numbers is None else held.numbers
    num_owners = held.num_rows * held.num_kv_heads
    _probe_kernel[(num_owners * triton.cdiv(held.num_competing, _TOKENS),)](
        **paged(held),
        requests_ptr=held.on_device,
        num_requests=held.num_rows // held.num_layers,
        weights_ptr=constants.probes,
        cos_ptr=cos,
        sin_ptr=sin,
        table_strides=cos.stride(0),
        position_stride=cos.stride(1),
        table_of_ptr=constants.table_of,
        scores_ptr=scores,
        PAIRS=num_pairs,
        INTERLEAVED=constants.interleaved,
        PER_TOKEN=probe.PER_TOKEN,
        TOKENS=_TOKENS,
        PAIR_BLOCK=triton.next_power_of_2(max(1, num_pairs)),
        CHANNELS=triton.next_power_of_2(head_size),
    )
    return scores


@triton.jit(do_not_specialize=[*UNSPECIALISED, "num_requests", "table_strides"])
def _probe_kernel(
    memory_ptr,
    codes_ptr,
    pages_ptr,
    pages_width,
    absent_ptr,
    num_competing,
    num_layers,
    num_heads,
    requests_ptr,
    num_requests,
    weights_ptr,
    cos_ptr,
    sin_ptr,
    table_strides,
    position_stride,
    table_of_ptr,
    scores_ptr,
    PAGE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    TOKENS: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    num_tiles = tl.cdiv(num_competing, TOKENS)
    owner, tile = (tl.program_id(0) // num_tiles).to(tl.int64), tl.program_id(0) % num_tiles
    row = owner // num_heads
    layer, request = row % num_layers, row // num_layers
    first = tl.load(requests_ptr + num_requests + request)
    position = tl.load(requests_ptr + 2 * num_requests + request)
    columns = tile * TOKENS + tl.arange(0, TOKENS)
    # What has a number keeps it, and what is absent is nobody's.
    inside = (columns < num_competing) & (columns >= first)
    if (tile + 1) * TOKENS <= first:
        return
    positions = (columns - first + position).to(tl.int64)
    places = places_of(pages_ptr, pages_width, owner, columns, inside, PAGE) * (2 * HEAD_SIZE)
    value_codes_ptr = codes_ptr
    if codes_ptr is not None:
        codes_ptr += layer * CODES
        value_codes_ptr = codes_ptr + 256
    weights_ptr += (layer * num_heads + owner % num_heads) * (2 * HEAD_SIZE + 1)
    channels = tl.arange(0, CHANNELS)
    logarithms = tl.zeros((TOKENS,), tl.float32)
    table = tl.load(table_of_ptr + layer).to(tl.int64)
    num_turned = 0
    if PAIRS > 0:
        num_turned = tl.where(table >= 0, 2 * PAIRS, 0)
        pairs = tl.arange(0, PAIR_BLOCK)
        is_pair = pairs < PAIRS
        first_of = pairs * 2 if INTERLEAVED else pairs
        second_of = first_of + (1 if INTERLEAVED else PAIRS)
        mask = inside[:, None] & is_pair[None, :] & (table >= 0)
        u = _weights(weights_ptr, first_of, is_pair)
        v = _weights(weights_ptr, second_of, is_pair)
        x = read(memory_ptr, places[:, None] + first_of[None, :], mask, codes_ptr)
        y = read(memory_ptr, places[:, None] + second_of[None, :], mask, codes_ptr)
        x, y = x.to(tl.float32), y.to(tl.float32)
        turns = table * table_strides + positions[:, None] * position_stride + pairs[None, :]
        cos = tl.load(cos_ptr + turns, mask=mask, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + turns, mask=mask, other=0.0).to(tl.float32)
        turned = cos * (u * x + v * y) + sin * (u * y - v * x)
        logarithms += tl.sum(turned / (cos * cos + sin * sin), 1)
    if num_turned < HEAD_SIZE:
        is_rest = (channels >= num_turned) & (channels < HEAD_SIZE)
        in_rest = inside[:, None] & is_rest[None, :]
        keys = read(memory_ptr, places[:, None] + channels[None, :], in_rest, codes_ptr)
        logarithms += tl.sum(keys.to(tl.float32) * _weights(weights_ptr, channels, is_rest), 1)
    is_channel = channels < HEAD_SIZE
    in_value = inside[:, None] & is_channel[None, :]
    values = read(
        memory_ptr + HEAD_SIZE, places[:, None] + channels[None, :], in_value, value_codes_ptr
    )
    weights_ptr += HEAD_SIZE
    logarithms += tl.sum(values.to(tl.float32) * _weights(weights_ptr, channels, is_channel), 1)
    logarithms += tl.load(weights_ptr + HEAD_SIZE)
    logarithms += positions * PER_TOKEN
    tl.store(scores_ptr + owner * num_competing + columns, tl.exp(logarithms), mask=inside)


@triton.jit
def _weights(weight, channels, is_channel):
    """Weights of some channels, one row."""
    return tl.load(weight + channels, mask=is_channel, other=0.0)[None, :]

"""Random traffic over attention layers with the CUDA backend, which no oracle judges.

What a scheduler keeps to is kept to here: chunks end where a request has a round and where a sparse
segment begins, and with pooled methods at every cut.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.engine.cuda_layers import Layers
from tests.engine.cuda_requests import Request
from vllm_kvselect.config import EvictionConfig

SERVERS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a budget in entries": ({"budget": 1024}, ()),
    "a fraction, which requests may choose": (
        {"budget": 0.2, "allow_override": ["method", "budget"]},
        ("adakv-perturb", "layer-defensivekv", "snapkv", "layer-probe", "snapkv-perturb"),
    ),
    "rounds": ({"budget": 300, "decode_budget": 200, "decode_interval": 32}, ()),
    "rounds of a probe": (
        {"method": "layer-probe", "budget": 300, "decode_budget": 200, "decode_interval": 32},
        (),
    ),
    "rounds of any size": (
        {"allow_override": ["budget", "decode_budget"], "method": "thetakv"},
        (),
    ),
    "cuts in prompts": ({"budget": 300, "prompt_interval": 256}, ()),
    "sparse prefill": (
        {"prefill": "critiprefill", "prefill_budget": 512, "prefill_dense_until": 1024},
        (),
    ),
}
"""A configuration, and the methods that requests choose."""


@dataclass
class Wish:
    """A request to come.

    Attributes:
        num_prompt: Tokens of its prompt.
        num_new: Tokens that it generates.
        eviction: Its configuration.
    """

    num_prompt: int
    num_new: int
    eviction: EvictionConfig


def chunk(request: Request, num_wanted: int) -> int:
    """So many of the next tokens as may be computed in one step."""
    prompt, begin = request.prompt, request.num_computed
    end = min(begin + num_wanted, request.query.shape[1])
    # Contexts aside, which are not drawn, tokens are generated one by one.
    end = min(end, max(prompt.plan.num_prompt_tokens, begin + 1))
    if (cut := prompt.plan.cuts.next_after(begin)) is not None:
        end = min(end, cut.position)
    if prompt.plan.segments is not None:
        border = prompt.plan.segments.last_border(end)
        end = (
            border
            if border > begin
            else min(begin + prompt.plan.segments.size, prompt.plan.segments.end)
        )
    return end - begin


def serve(
    layers: Layers,
    wishes: Sequence[Wish],
    draw: random.Random,
    most: int,
    chunks: Sequence[int] = (1000, 3000, 20000),
) -> int:
    """Serves requests, a few at a time and in changing order; one of them is preempted.

    Args:
        layers: The layers.
        wishes: The requests.
        draw: Draws sizes of chunks and the order of rows.
        most: Requests that run at once.
        chunks: Tokens of a prompt in a step.

    Returns:
        Steps.
    """
    waiting, running, num_steps, has_preempted = [*wishes], [], 0, False
    while waiting or running:
        if waiting and len(running) < most:
            wish = waiting.pop(0)
            num_tokens = wish.num_prompt + wish.num_new
            running.append(layers.served(wish.num_prompt, num_tokens, wish.eviction))
        draw.shuffle(running)
        rows = [(each, chunk(each, draw.choice(chunks))) for each in running]
        layers.run(*rows)
        num_steps += 1
        past = [
            each for each in running if each.num_computed > each.prompt.plan.num_prompt_tokens + 2
        ]
        if past and not has_preempted:
            layers.preempt(past[0])
            has_preempted = True
        for request in [each for each in running if each.num_computed >= each.query.shape[1]]:
            layers.release(request)
            running.remove(request)
    return num_steps

"""Plans of requests that tests make up."""

from types import SimpleNamespace

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.plan import Plan, plan


def planned(
    num_prompt_tokens: int, block_size: int, eviction: EvictionConfig, max_tokens: int = 0
) -> Plan:
    """The plan of a request that asks for nothing of its own but its answer's length."""
    params = SimpleNamespace(extra_args=None, max_tokens=max_tokens, prompt_logprobs=None)
    return plan(eviction, params, None, num_prompt_tokens, block_size)

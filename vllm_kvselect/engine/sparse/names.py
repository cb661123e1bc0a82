"""Names of blocks that a sparse prefill computes, in the prefix cache.

From the first sparse segment on, keys and values depend on what earlier tokens read. So the blocks
there may only be found by requests that would compute the same. vLLM's own hash of a block stands
for its tokens and all before them, adapter and salt included; ours adds the settings, and
what else the choice of blocks depends on.
"""

import hashlib
from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHash

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.segments import Segments


def sparse_names(
    hashes: Sequence[BlockHash], block_size: int, segments: Segments, config: EvictionConfig
) -> list[BlockHash]:
    """Names the full blocks of a prompt.

    Blocks before the first sparse segment are as stock vLLM computes them, and keep their hash. The
    queries of a whole segment choose what it reads: so each of its blocks is named by all of its
    tokens. Where the sparse segments end depends on the prompt's length, and the blocks behind them
    are named by it. vLLM makes the hash of any later block from the last one. `block_size`, tokens
    per hash, divides the segments' size.
    """
    # What of it the choice of blocks depends on.
    fields = (each for each in config.model_dump().items() if each[0].startswith("prefill"))
    settings = hashlib.sha256(repr(sorted(fields)).encode()).digest()
    names = list(hashes)
    for index in range(segments.start // block_size, len(hashes)):
        position = index * block_size
        if position < segments.end:
            last = (position // segments.size + 1) * segments.size // block_size - 1
            of_segment: bytes = hashes[last]
        else:
            of_segment = str(segments.end).encode()
        named = hashlib.sha256(settings + hashes[index] + of_segment)
        names[index] = BlockHash(named.digest())
    return names

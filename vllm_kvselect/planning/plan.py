"""The plan of a request: what scheduler and workers each compute, and never tell each other."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import Cut, Cuts, cuts
from vllm_kvselect.planning.segments import Segments, sparse_segments
from vllm_kvselect.request import Sampling, planned_config


@dataclass(frozen=True)
class Plan:
    """All that is decided about a request before its first token is computed."""

    num_prompt_tokens: int
    settings: EvictionConfig
    cuts: Cuts = field(default_factory=Cuts)
    segments: Segments | None = None

    @property
    def has_context(self) -> bool:
        """Whether entries of a marked context are dropped."""
        return self.settings.context is not None and self.num_states > 0

    # Asked for each request in every step, so what never changes is worked out once.

    @cached_property
    def num_in_prompt(self) -> int:
        """Cuts that lie in the prompt, its end included."""
        return self.cuts.num_made(self.num_prompt_tokens)

    @cached_property
    def num_states(self) -> int:
        """Cuts inside the prompt: what they retain depends on the tokens before them alone."""
        return self.cuts.num_made(self.num_prompt_tokens - 1)

    @property
    def ends_with_states(self) -> bool:
        """Whether each cut leaves a state: of requests with others, or rounds, not all do."""
        return len(self.cuts) == self.num_states

    @property
    def context_cut(self) -> Cut:
        """The cut at a marked context's end."""
        assert self.has_context
        return self.cuts[self.num_states - 1]

    @property
    def is_stock(self) -> bool:
        """Whether the request is vLLM's from its first token to its last."""
        return not self.cuts and self.segments is None

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits that differ where plans do."""
        text = f"{self.num_prompt_tokens} {self.settings.model_dump_json()} {list(self.cuts)}"
        return hashlib.sha256(f"{text} {self.segments}".encode()).hexdigest()[:16]


def plan(
    server: EvictionConfig,
    params: Sampling | None,
    token_ids: Sequence[int] | None,
    num_prompt_tokens: int,
    block_size: int,
    page_size: int | None = None,
) -> Plan:
    """Plans a request.

    The prompt's length counts, not what is known of its answer: a request that was preempted comes
    again with more tokens, and its plan is the same. Without parameters it asks for what the server
    does by default; `token_ids` are None if the prompt is not made of tokens.
    """
    settings = planned_config(server, params)
    max_tokens = (params.max_tokens if params is not None else None) or 0
    made = cuts(num_prompt_tokens, block_size, settings, max_tokens, page_size)
    segments = sparse_segments(num_prompt_tokens, made, settings)
    return Plan(num_prompt_tokens, settings, made, segments)

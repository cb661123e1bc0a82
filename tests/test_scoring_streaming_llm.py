import torch
from hypothesis import given
from hypothesis import strategies as st

from tests import oracle
from tests.strategies import kv_heads, many, scoring_inputs, windows
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.scoring.streaming_llm import streaming_llm_scores


@many
@given(kv_heads, st.integers(1, 60), windows)
def test_the_latest_come_first(num_kv_heads: int, num_scored: int, window: int) -> None:
    query = torch.empty(window, num_kv_heads, 8)
    key = torch.empty(num_kv_heads, num_scored + window, 8)
    config = EvictionConfig(method="streaming-llm")
    scores = streaming_llm_scores(scoring_inputs(query, key, 1.0), config)
    assert scores.shape == (num_kv_heads, num_scored)
    assert scores.dtype == torch.float32
    expected = list(reversed(range(num_scored)))
    assert [oracle.best_first(row) for row in scores.tolist()] == [expected] * num_kv_heads

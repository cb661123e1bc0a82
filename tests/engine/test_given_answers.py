"""Given answers under model runner V2, whose sampler calls the processor with a whole batch.

Under V1 `evaluate` is tested with them, on a served engine.
"""

from types import SimpleNamespace

import numpy as np
import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

from vllm_kvselect.engine.given_answers import KEY, GivenAnswers
from vllm_kvselect.evaluation.endpoint import GIVEN_ANSWERS

PROMPT_LENS = np.array([0, 7, 5, 9], dtype=np.int32)
"""Of the requests in four slots."""


def context(slots: list[int], seq_lens: list[int]) -> LogitsContext:
    """A step in which each request has one row."""
    rows = torch.tensor(slots)
    return LogitsContext(
        expanded_idx_mapping=rows,
        idx_mapping=rows,
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.zeros_like(rows),
        input_ids=torch.zeros_like(rows),
        pos=torch.tensor(seq_lens) - 1,
        seq_lens_upper_bound_np=np.array(seq_lens),
    )


def given(*answer: int) -> SamplingParams:
    return SamplingParams(extra_args={KEY: list(answer)})


def processor() -> GivenAnswers:
    return GivenAnswers(None, SimpleNamespace(prompt_len=SimpleNamespace(np=PROMPT_LENS)))


def test_vllm_accepts_the_processor_under_v2() -> None:
    assert _load_v2_logitsprocs_by_fqcns([GIVEN_ANSWERS]) == [GivenAnswers]


def test_each_row_gets_the_next_token_of_its_own_answer() -> None:
    answers = processor()
    assert answers.add_request(1, given(3, 4))
    assert not answers.add_request(2, SamplingParams())
    assert answers.add_request(3, given(6, 7, 8))
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    stock = logits.clone()
    forced = answers.apply(logits, context([3, 1, 2], [9 + 2, 7, 5]))
    assert forced.argmax(dim=1).tolist()[:2] == [8, 3]
    assert (forced[:2].isfinite().sum(dim=1) == 1).all()
    assert torch.equal(forced[2], stock[2])


def test_a_chunk_of_a_prompt_and_what_follows_an_answer_are_left_alone() -> None:
    answers = processor()
    answers.add_request(1, given(3))
    answers.add_request(3, given(6))
    logits = torch.zeros(2, 10)
    assert not answers.apply(logits, context([1, 3], [6, 10])).any()


def test_a_slot_forgets_the_answer_of_the_request_before() -> None:
    answers = processor()
    answers.add_request(1, given(3))
    answers.add_request(1, SamplingParams())
    assert not answers.apply(torch.zeros(1, 10), context([1], [7])).any()

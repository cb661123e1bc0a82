"""The references in float32 compute what they compute in float64, and what the oracle says."""

import pytest
import torch

from tests.kernels.backend import Backend, behind_stage_1
from tests.kernels.twins import *  # noqa: F403 (tests)
from tests.method_cases import METHOD_CASES
from vllm_kvselect.kernels import base
from vllm_kvselect.kernels.base import REFERENCES
from vllm_kvselect.selecting import pruning


@pytest.fixture(scope="module")
def backend() -> Backend:
    return Backend(
        REFERENCES,
        base,
        behind_stage_1(pruning.needed_value_norms),
        METHOD_CASES,
        num_examples=25,
        least_replaced=0,
        dtypes=(torch.float32,),  # they round norms to the type of the values
        norms_rtol=256 * torch.finfo(torch.float32).eps,
    )

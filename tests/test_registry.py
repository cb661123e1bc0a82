"""Methods are named parts: every name stands for something."""

from dataclasses import fields

import pytest

from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.methods.registry import KNOWN_METHODS, scorer_named
from vllm_kvselect.scoring.observer import Observer
from vllm_kvselect.selecting.ranking import RANKINGS


@pytest.mark.parametrize("name", KNOWN_METHODS)
def test_every_part_of_a_method_is_there(name: str) -> None:
    method = KNOWN_METHODS[name]
    assert callable(scorer_named(method.scorer))
    assert method.weigher is None or callable(scorer_named(method.weigher))
    assert issubclass(method.observer_class, Observer)
    assert method.ranking in RANKINGS
    assert method.allocator in {field.name for field in fields(Kernels)}

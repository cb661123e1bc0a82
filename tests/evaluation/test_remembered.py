import pytest
import torch

from tests.evaluation.test_retained import LAYERS, make_config, make_prompt
from vllm_kvselect.evaluation.remembered import remembering
from vllm_kvselect.evaluation.retained import retained_entries
from vllm_kvselect.methods import METHODS
from vllm_kvselect.scoring.value_norms import value_norms

BUDGETS = (0.2, 0.4)


@pytest.mark.parametrize("what_if", [None, "equal-norms"])
def test_choices_are_those_of_the_references(what_if: str | None) -> None:
    prompt = make_prompt(what_if=what_if)
    all_at_once = prompt._replace(twins=remembering())
    for method in METHODS:
        for budget in BUDGETS:
            config = make_config(method, budget=budget)
            expected = retained_entries(prompt, config)
            assert torch.equal(retained_entries(all_at_once, config), expected), method


def test_norms_of_a_layer_are_computed_once() -> None:
    layer = LAYERS[0]
    norms = remembering()[value_norms]
    first = norms(layer.value, layer.output_projection.weight)
    assert norms(layer.value, layer.output_projection.weight) is first
    assert torch.equal(first, value_norms(layer.value, layer.output_projection.weight))
    assert norms(layer.value[:, :40], layer.output_projection.weight).shape[1] == 40

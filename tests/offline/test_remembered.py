import pytest
import torch

from tests.offline.test_retained import LAYERS, make_config, make_prompt
from vllm_kvselect import choice
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.offline import remembered
from vllm_kvselect.offline.remembered import remembering
from vllm_kvselect.offline.retained import retained_entries
from vllm_kvselect.registry import METHODS
from vllm_kvselect.scoring import value_norms
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.snapkv import snapkv_scores

BUDGETS = (0.2, 0.4)


@pytest.mark.parametrize("equal_norms", [False, True])
def test_choices_are_those_of_the_references(equal_norms: bool) -> None:
    prompt = make_prompt(equal_norms=equal_norms)
    all_at_once = prompt._replace(kernels=remembering())
    for method in METHODS:
        for budget in BUDGETS:
            config = make_config(method, budget=budget)
            expected = retained_entries(prompt, config)
            assert torch.equal(retained_entries(all_at_once, config), expected), method


def test_norms_of_a_layer_are_computed_once() -> None:
    layer = LAYERS[0]
    norms = remembering().projected_value_norms
    first = norms(layer.value, layer.output_projection)
    assert norms(layer.value, layer.output_projection) is first
    assert torch.equal(first, value_norms.value_norms(layer.value, layer.output_projection.weight))
    assert norms(layer.value[:, :40], layer.output_projection).shape[1] == 40


def test_settings_on_one_prompt_share_the_norms_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[torch.Size] = []

    def counted(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        computed.append(value.shape)
        return value_norms.value_norms(value, weight)

    monkeypatch.setattr(remembered, "value_norms", counted)
    prompt = make_prompt()._replace(kernels=remembering())
    for method in METHODS:
        retained_entries(prompt, make_config(method, budget=0.2))
    assert len(computed) == len(LAYERS)


def test_scores_of_a_layer_are_computed_once_for_all_budgets_and_methods_that_share_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scored: list[int] = []

    def counted(inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
        scored.append(inputs.layer_index)
        return snapkv_scores(inputs, config)

    monkeypatch.setattr(choice, "scorer_named", lambda name: counted)
    prompt = make_prompt()._replace(kernels=remembering())
    for method in ("snapkv", "adakv-perturb", "layer-thetakv"):
        for budget in BUDGETS:
            retained_entries(prompt, make_config(method, budget=budget))
    assert sorted(scored) == list(range(len(LAYERS)))
    retained_entries(prompt, make_config("snapkv", kernel_size=3))
    assert len(scored) == 2 * len(LAYERS)

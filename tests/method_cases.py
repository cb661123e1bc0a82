"""The one list of method cases: every method, and every parameter at its ends, runs every test."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.strategies import Layer, Shape, rotation, scoring_inputs
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.registry import KNOWN_METHODS, METHODS
from vllm_kvselect.scoring.inputs import ScoringInputs
from vllm_kvselect.scoring.value_norms import OutputProjection


@dataclass(frozen=True)
class MethodCase:
    """A method with some parameters away from their defaults.

    Attributes:
        method: Key of `KNOWN_METHODS`.
        values: Further fields of `EvictionConfig`.
    """

    method: str
    values: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the case in test reports."""
        return "-".join([self.method, *(f"{key}={value}" for key, value in self.values.items())])

    def config(self, **values: Any) -> EvictionConfig:
        """The configuration of the case; `values` (budget, window) come from the test."""
        return EvictionConfig.parse({"method": self.method, **self.values, **values})

    def inputs(self, shape: Shape, layer: Layer, layer_index: int = 0) -> ScoringInputs:
        """What the method is given of a layer, which may have more tokens than the prompt."""
        method = KNOWN_METHODS[self.method]
        prompt = slice(shape.num_prompt_tokens)
        return scoring_inputs(
            layer.prompt_query[prompt] if method.scorer.whole_prompt else layer.query,
            layer.key[:, prompt],
            shape.scale,
            layer.value[:, : shape.num_tokens],
            OutputProjection.of(layer.output_projection) if method.perturbation else None,
            layer.sinks,
            layer_index,
            rotation(shape.head_size) if "rotation" in method.needs else None,
            layer.probe if "probe" in method.needs else None,
        )


METHOD_CASES: tuple[MethodCase, ...] = (
    *(MethodCase(name) for name, method in KNOWN_METHODS.items() if not method.scorer.replay),
    MethodCase("streaming-llm", {"keep_first": 0}),
    MethodCase("streaming-llm", {"keep_first": 1000}),
    MethodCase("random", {"seed": 2**32 - 1}),
    MethodCase("expected-attention", {"keep_first": 0, "expected_eps": 0.0}),
    MethodCase("expected-attention", {"keep_first": 1000, "future": 1}),
    MethodCase("probe", {"keep_first": 0}),
    MethodCase("layer-probe", {"keep_first": 1000}),
    MethodCase("r-kv", {"r_kv_lam": 1.0, "pooling": "mean"}),
    MethodCase("r-kv", {"r_kv_lam": 0.0, "r_kv_threshold": 0.0}),
    MethodCase("snapkv", {"kernel_size": 1}),
    MethodCase("snapkv", {"kernel_size": 3, "pooling": "mean"}),
    MethodCase("snapkv", {"kernel_size": 101}),
    MethodCase("snapkv", {"group_reduction": "max"}),
    MethodCase("snapkv-perturb", {"alpha": 0.0}),
    MethodCase("snapkv-perturb", {"alpha": 0.25, "eps": 0.0}),
    MethodCase("snapkv-perturb", {"alpha": 1.0}),
    MethodCase("snapkv-perturb", {"alpha": 0.25, "keep_first": 3}),
    MethodCase("adakv", {"safeguard": 0.0}),
    MethodCase("adakv", {"safeguard": 1.0}),
    MethodCase("adakv", {"kernel_size": 1}),
    MethodCase("adakv", {"floor": "minimum", "safeguard": 0.5}),
    MethodCase("adakv-perturb", {"alpha": 0.0, "stage_2_scores": "unpooled"}),
    MethodCase("adakv-perturb", {"alpha": 0.25, "eps": 0.0}),
    MethodCase("adakv-perturb", {"alpha": 1.0, "safeguard": 0.0}),
    MethodCase("adakv-perturb", {"alpha": 0.9, "eps": 1.0, "kernel_size": 1, "safeguard": 0.5}),
    MethodCase("defensivekv", {"kernel_size": 5, "pooling": "mean"}),
    MethodCase("adakv", {"keep_first": 9, "safeguard": 0.0}),
    MethodCase("adakv-perturb", {"alpha": 0.0, "keep_first": 9}),
    MethodCase("defensivekv", {"mass": 0.0}),
    MethodCase("defensivekv", {"keep_first": 9}),
    MethodCase("defensivekv", {"mass": 0.5, "stage_2_scores": "unpooled"}),
    MethodCase("thetakv", {"lam": 0.0, "stage_2_scores": "unpooled"}),
    MethodCase("thetakv", {"alpha": 0.0, "lam": 15.0, "safeguard": 0.0}),
    MethodCase("thetakv", {"floor": "minimum", "group_reduction": "max"}),
    MethodCase("thetakv", {"alpha": 0.0, "keep_first": 9}),
    MethodCase("pyramidkv", {"beta": 1}),
    MethodCase("pyramidkv", {"keep_first": 9}),
    MethodCase("ada-pyramidkv-perturb", {"keep_first": 9}),
    MethodCase("pyramidkv-perturb", {"stage_2_scores": "unpooled"}),
    MethodCase("ada-pyramidkv", {"beta": 2, "floor": "minimum"}),
    MethodCase("layer-defensivekv", {"mass": 0.5}),
    MethodCase("layer-probe", {"keep_first": 9}),
    MethodCase("r-kv", {"keep_first": 9}),
    MethodCase("layer-thetakv", {"lam": 0.0, "safeguard": 0.0}),
)

SERVED_CASES = tuple(case for case in METHOD_CASES if case.method in METHODS)

every_method_case = pytest.mark.parametrize(
    "case", METHOD_CASES, ids=[case.name for case in METHOD_CASES]
)
every_pooled_case = pytest.mark.parametrize(
    "case",
    [case for case in METHOD_CASES if KNOWN_METHODS[case.method].pooled],
    ids=lambda case: case.name,
)

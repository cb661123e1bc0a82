"""What computes the parts of a choice, as `twins.py` tests it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.method_cases import MethodCase
from tests.strategies import Layer
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.kernels import rows
from vllm_kvselect.kernels.base import Kernels
from vllm_kvselect.scoring.held import Held
from vllm_kvselect.scoring.inputs import Scorer, ScoringInputs
from vllm_kvselect.scoring.value_norms import OutputProjection
from vllm_kvselect.selecting import selection

EPS = torch.finfo(torch.float32).eps
HALVES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Backend:
    """A set of kernels under test.

    Attributes:
        kernels: The kernels.
        module: Where twins stand.
        needed_norms: Norms that two-stage selection computes, of `(scores, weights, value,
            projection, budgets, of_stage_1, eps)`; 0 for the others.
        cases: Methods that are run on a broken model.
        num_examples: Of each test that draws them.
        least_replaced: So many parts are more than references.
        dtypes: Of queries, keys and values.
        device: Where tensors lie.
        pack: Prepares an output projection.
        norms_rtol: What norms may be off between calls.
    """

    kernels: Kernels
    module: ModuleType
    needed_norms: Callable[..., torch.Tensor]
    cases: tuple[MethodCase, ...]
    num_examples: int = 100
    least_replaced: int = 8
    dtypes: tuple[torch.dtype, ...] = HALVES
    device: str = "cpu"
    pack: Callable[[OutputProjection], OutputProjection] = lambda projection: projection
    norms_rtol: float = 0.0

    def ready(self, inputs: ScoringInputs) -> ScoringInputs:
        """The same inputs, with the output projection as the kernels read it."""
        projection = inputs.output_projection
        return replace(inputs, output_projection=projection and self.pack(projection))

    def held(self, inputs: ScoringInputs) -> Held:
        """One row; what competes is what values cover, and comes before the queries."""
        value = inputs.value[:, : inputs.num_scored]
        return Held.of([replace(self.ready(inputs), value=value)])

    def scores(self, scorer: Scorer, inputs: ScoringInputs, config: EvictionConfig) -> torch.Tensor:
        """What the twin of a scorer says of a layer, `[num_kv_heads, n]`."""
        return rows.scores(self.kernels, scorer, self.held(inputs), config)[0]

    def value_norms(self, value: torch.Tensor, projection: OutputProjection) -> torch.Tensor:
        """Norms of a layer's values, `[num_kv_heads, n]`."""
        return rows.value_norms(self.kernels, of_values(value, projection))[0]

    def select_pruned(
        self,
        scores: torch.Tensor,
        weights: torch.Tensor,
        value: torch.Tensor,
        projection: OutputProjection,
        budgets: torch.Tensor,
        num_retained: int,
        of_stage_1: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        """What a layer retains in two stages."""
        held = of_values(value, projection)
        given = scores[None], weights[None], budgets, [num_retained], of_stage_1, eps
        return rows.select_pruned(self.kernels, held, *given)

    def placed(self, layer: Layer) -> Layer:
        """A layer whose tensors lie on the device."""
        tensors = {name: part for name, part in vars(layer).items() if part is not None}
        return replace(layer, **{name: part.to(self.device) for name, part in tensors.items()})

    def ranked(self, seed: int, heads: int, num_tokens: int, tied: bool) -> torch.Tensor:
        """Scores, rows apart from each other as in a slice, with an infinity as selection has."""
        scores = torch.rand(heads, num_tokens + 3, generator=torch.Generator().manual_seed(seed))
        if tied:
            scores = (scores * 4).round() / 4 - 0.5
        scores[0, 0] = torch.inf
        return scores.to(self.device)[:, :num_tokens]

    def budgets(self, draw: st.DrawFn, heads: int, num_tokens: int) -> torch.Tensor:
        """Entries of each head, none and all among them."""
        each = st.lists(st.integers(0, num_tokens), min_size=heads, max_size=heads)
        return torch.tensor(draw(each)).to(self.device)


def of_values(value: torch.Tensor, projection: OutputProjection) -> Held:
    """A row of which values alone are read."""
    query = value.new_empty(0, value.shape[0], value.shape[2])
    return Held.of([ScoringInputs(query, value, value, 1.0, projection)])


def behind_stage_1(needed: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Backend.needed_norms` of a function that is told what stage 1 has taken."""

    def call(
        scores: torch.Tensor,
        weights: torch.Tensor,
        value: torch.Tensor,
        projection: OutputProjection,
        budgets: torch.Tensor,
        of_stage_1: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        stage_1 = selection.best_mask(scores, of_stage_1)
        return needed(weights, value, projection, stage_1, budgets, eps)

    return call


def drawn(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """A test of a backend on as many examples as it has time for; `dtype` is one of its own."""

    def decorate(check: Callable[..., None]) -> Callable[[Backend], None]:
        def test(backend: Backend) -> None:
            own = {"dtype": st.sampled_from(backend.dtypes)} if "dtype" in annotations else {}
            run = given(**strategies, **own)(lambda **values: check(backend, **values))
            limits = settings(max_examples=backend.num_examples, deadline=None, derandomize=True)
            limits(run)()

        annotations = check.__annotations__
        test.__name__, test.__doc__, test.__module__ = (
            check.__name__,
            check.__doc__,
            check.__module__,
        )
        return test

    return decorate

"""METHODS: every method that is served, by name. A method is a scorer, a scope and a use of norms.

Names are made from the parts, here and nowhere else. KNOWN_METHODS has those besides that are
measured off the engine only: what `scorers.SERVED` does not name. All of it is plain data: parts
are named, not imported.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property

from vllm_kvselect.norms import EVERY_NORM, NORMS, Norms, Weights
from vllm_kvselect.scopes import SCOPES, AllocatorName, Floor, Scope
from vllm_kvselect.scorers import (
    SCORERS,
    SERVED,
    Need,
    NormsName,
    Parameters,
    Pooling,
    ScopeName,
    Scorer,
)


@dataclass(frozen=True)
class Method:
    """A way to choose what is retained."""

    scorer: Scorer
    scope: Scope
    norms: Norms
    paper: str
    summary: str

    @property
    def scores(self) -> str:
        """Function in `scoring/` by whose scores entries are ranked, and stage 1 selects."""
        is_product = self.norms.ranking == "product"
        return (is_product and self.scorer.weights) or self.scorer.scores

    @property
    def weights(self) -> str | None:
        """Function whose scores stage 2 multiplies by norms; None for those of `scores`."""
        return self.scorer.weights if Weights in self.norms.parameters else None

    @property
    def allocator(self) -> AllocatorName:
        """Pages of each head."""
        return self.norms.allocator or self.scope.allocator

    @property
    def pooled(self) -> bool:
        """Whether the layers of a request share its packed pages."""
        return self.scope.pooled

    @property
    def perturbation(self) -> bool:
        """Whether projected value norms, and so the output projection, are needed."""
        return self.norms is not NORMS["none"]

    @cached_property
    def needs(self) -> frozenset[Need]:
        """What every layer must be bound to; models may not let it be found."""
        projection: frozenset[Need] = frozenset({"output projection"})
        return self.scorer.needs | (projection if self.perturbation else frozenset())

    @cached_property
    def parameters(self) -> tuple[type[Parameters], ...]:
        """What it reads of the configuration besides budget and window."""
        of_allocator = (Floor,) if self.allocator == "adaptive_pages" else ()
        of_parts = (*self.scorer.parameters, *self.scope.parameters, *self.norms.parameters)
        return (*of_parts, *of_allocator)

    @property
    def cost(self) -> str:
        """What it computes, per layer and prompt."""
        # Pruning takes budgets, which layers that share pages learn too late.
        is_pruned = self.norms.two_stages and not self.pooled
        of_norms = self.norms.cost if is_pruned or not self.norms.two_stages else EVERY_NORM
        return "; ".join(filter(None, (self.scorer.cost, of_norms)))

    @property
    def limits(self) -> str:
        """What it cannot do or see."""
        return "; ".join(filter(None, (self.scorer.limits, self.scope.limits)))

    @property
    def not_in_rounds(self) -> str:
        """Why it cannot choose again while a request generates; empty if it can."""
        parts = (self.scorer, self.scope, self.norms)
        return next((part.not_in_rounds for part in parts if part.not_in_rounds), "")

    @property
    def in_rounds(self) -> bool:
        """Whether it can choose again while a request generates."""
        return not self.not_in_rounds

    @property
    def in_prompts(self) -> bool:
        """Whether cuts in a prompt suit it: a window there is far from the question at its end."""
        return self.in_rounds and Pooling not in self.scorer.parameters


@dataclass(frozen=True)
class _Form:
    """A scorer in some scopes and with some uses of norms, under one name."""

    name: str
    scorer: Scorer
    scopes: tuple[ScopeName, ...]
    norms: tuple[NormsName, ...]
    paper: str
    summary: str

    @classmethod
    def of(cls, name: str, scorer: Scorer) -> "_Form":
        """A scorer under its own name."""
        return cls(name, scorer, scorer.scopes, scorer.norms, scorer.paper, scorer.summary)

    def methods(self) -> Iterator[tuple[str, Method]]:
        """What the scopes and the norms make of it, by name.

        The first scope adds no prefix and the first use of norms no suffix: `keydiff`,
        `keydiff-perturb`, `ada-keydiff`, `ada-keydiff-perturb` and so on.
        """
        for scope_name in self.scopes:
            scope, name = SCOPES[scope_name], self.name
            paper, summary = self.paper, self.summary
            if scope_name != self.scopes[0]:
                name = f"{scope.prefix}{self.name}"
                paper = ", ".join(filter(None, (self.paper, scope.paper)))
                summary = f"{self.summary}; {scope.summary}"
            for norms_name in self.norms:
                norms = NORMS[norms_name]
                if norms_name == self.norms[0]:
                    yield name, Method(self.scorer, scope, norms, paper, summary)
                else:
                    full_paper, full_summary = f"{paper}, {norms.paper}", norms.summary.format(name)
                    method = Method(self.scorer, scope, norms, full_paper, full_summary)
                    yield f"{name}{norms.suffix}", method


_SNAPKV = SCORERS["snapkv"]
_FORMS = (
    *(_Form.of(name, scorer) for name, scorer in SCORERS.items()),
    # What papers made of SnapKV's scores.
    _Form(
        "adakv",
        _SNAPKV,
        ("layer",),
        ("none", "two stages"),
        paper="AdaKV, arXiv 2407.11550",
        summary="what the last prompt tokens attend to, more for heads that attend widely",
    ),
    _Form(
        "pyramidkv",
        _SNAPKV,
        ("pyramid", "adaptive pyramid"),
        ("none", "two stages"),
        paper="PyramidKV, arXiv 2406.02069",
        summary="as snapkv, more in lower layers and less in higher ones",
    ),
    _Form(
        "thetakv",
        _SNAPKV,
        ("layer", "all"),
        ("bound",),
        paper="our own, from Theorem 2 of arXiv 2502.03805",
        summary="as adakv-perturb, but heads too share by smoothed attention times norm",
    ),
)

KNOWN_METHODS: dict[str, Method] = {
    name: method for form in _FORMS for name, method in form.methods()
}
"""With those that are measured off the engine alone."""

METHODS: dict[str, Method] = {
    name: KNOWN_METHODS[name] for names in SERVED.values() for name in names
}

PARAMETERS: tuple[type[Parameters], ...] = tuple(
    dict.fromkeys(group for method in KNOWN_METHODS.values() for group in method.parameters)
)
"""What all parts of all methods read of the configuration."""


AUTO = "auto"
"""What stands for the best method that a model allows, until a server's front end has chosen it."""

PREFERRED: tuple[str, ...] = ("layer-probe", "layer-defensivekv", "thetakv", "snapkv")
"""What `auto` chooses from, the best first (docs/quality.md); any model allows the last one."""

AUTO_INTERVAL = 2048
"""The `prompt_interval` of `auto`, with methods that cuts in prompts suit (docs/quality.md)."""


def best_method(suits: Callable[[Method], bool]) -> str:
    """The name of the best method that suits."""
    return next(name for name in PREFERRED if suits(METHODS[name]))


def methods_without(need: Need) -> list[str]:
    """Names of the methods that any model allows which lacks something."""
    return [name for name, method in METHODS.items() if need not in method.needs]


def not_served(name: str) -> str | None:
    """Why a known method is not served, and which served one comes nearest; None if it is."""
    if name in METHODS or name not in KNOWN_METHODS:
        return None
    asked = KNOWN_METHODS[name]
    instead = asked.scorer.served_instead
    scorer = asked.scorer if instead is None else SCORERS[instead]
    alike = {own: method for own, method in METHODS.items() if method.scorer is scorer}
    best = max(
        alike, key=lambda own: (alike[own].norms is asked.norms, alike[own].scope is asked.scope)
    )
    return f"is not served, only measured off the engine; {best!r} comes nearest"


def nearest(name: object, names: Iterable[str]) -> str:
    """`did you mean ...?` with the one that is most like a name; empty if none is like it."""
    found = get_close_matches(str(name).lower(), [*names], 1)
    return f"did you mean {found[0]!r}? " if found else ""

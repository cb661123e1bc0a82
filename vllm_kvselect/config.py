"""The one configuration object: frozen, validated once, unknown keys are errors."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from vllm_kvselect.methods.registry import KNOWN_METHODS, METHODS

METHOD_NAMES: tuple[str, ...] = ("none", *METHODS)

OverrideName = Literal[
    "method",
    "budget",
    "context",
    "decode_budget",
    "decode_interval",
    "prefill",
    "prefill_budget",
]
OVERRIDE_NAMES: tuple[str, ...] = get_args(OverrideName)
"""Fields that a request may change, where the server allows it."""

CONFIG_KEY = "kv_eviction"
"""Key of this configuration in `VllmConfig.additional_config`."""


class ConfigError(ValueError):
    """A configuration that cannot be honoured: names the value, the accepted ones, the remedy."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: PyYAML alone reads `1e-4`, without a point, as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


class EvictionConfig(BaseModel):
    """What is retained of a prompt's KV cache once the prompt is prefilled.

    Attributes:
        method: Scorer and allocator, a key of `methods.registry.METHODS`; `none` is stock. Off the
            engine also one of `KNOWN_METHODS`.
        budget: Entries retained per KV head per layer, averaged over a layer's heads, or over those
            of all layers that share pages; observation window included. An `int` counts entries, a
            `float` is a fraction of the prompt, or of its context where that is marked.
        decode_budget: Entries per KV head to which a request is brought back again and again while
            it generates; 0 lets its answer grow. What the prompt left counts, and so does the
            window.
        decode_interval: Tokens from one such round to the next.
        keep_prompt: Whether rounds leave alone what is retained of the prompt, in whole blocks; the
            `decode_budget` counts what is generated only.
        context: Tokens at the beginning of the prompt that are compressed on their own, up to the
            last block border among them: what follows, such as a question, neither shapes what is
            retained of them nor is dropped. `chat`: what comes before the first user's turn that
            leaves something to drop. None: the whole prompt is compressed.
        turn_start: Token ids with which a user's turn begins, for `chat`; empty for what the
            model's chat template says.
        prefill: `critiprefill` lets later tokens of a prompt read only the blocks before them that
            are critical (arXiv 2409.12490); `dense`, the default, all of them, as stock vLLM.
        prefill_budget: Tokens before its segment that such a token reads, in whole blocks.
        prefill_segment: Neighbouring tokens that read the same blocks.
        prefill_block: Tokens of a block that is read or not.
        prefill_dense_until: Tokens at the beginning of the prompt that read all before them.
        prefill_dense_layers: First layers in which all tokens do.
        prefill_layer_fusion: Weight of the layers before in a block's criticality.
        prefill_coverage: Share of the estimated attention that the blocks must cover, instead of
            `prefill_budget` (arXiv 2502.20766); 0 to read a fixed number.
        prefill_values: Whether criticality is multiplied by the block's largest projected value
            norm.
        window: Observation window in tokens: the last prompt tokens, whose queries score the
            entries before them. Always retained.
        kernel_size: Width of the pooling of the scores along the tokens (SnapKV, section 4).
        pooling: Pooling by the largest or by the mean of `kernel_size` tokens.
        group_reduction: Scores of a query group's heads are averaged, or the largest is taken.
        alpha: Share of a head's budget that stage 1 of a `-perturb` method fills by score alone
            (Algorithm 1 of arXiv 2502.03805).
        eps: Added to the score in stage 2, before it is multiplied by the projected value norm.
        stage_2_scores: Stage 2 multiplies the pooled scores by the norms, or those without pooling.
        safeguard: Share of a head's even budget that adaptive allocation may not take away
            (AdaKV, arXiv 2407.11550, section 4.2).
        floor: The safeguard is blended with the adaptive budget (authors), or its least (kvpress).
        beta: Steepness of PyramidKV: the last layer gets a `beta`-th of the mean budget.
        mass: Share of the attention that stage 1 of DefensiveKV takes.
        lam: Weight, in windows, of the even prior with which ThetaKV smooths attention.
        r_kv_lam: Weight of importance beside redundancy (R-KV, arXiv 2505.24133).
        r_kv_threshold: Cosine above which two keys are alike for it.
        future: Positions after the prompt whose mean rotation stands for that of later queries
            (Expected Attention, arXiv 2510.00636).
        expected_eps: Added to expected attention before it is multiplied by the norm of the value.
        num_sinks: First tokens that `streaming-llm`, `expected-attention` and `probe` retain,
            whatever they say; `expected-attention` leaves their queries and keys out of what it
            expects.
        probe: File with the model's calibrated probe (`vllm-kvselect calibrate`); None for the one
            in the user's cache or in this package that fits the model's weights.
        seed: Seed of `random`.
        decode_attention: Whose kernel attends to what is retained: the attention backend's, or
            xformers' `triton_splitk` (CUDA, extra `xformers`) for rows with one query.
        allow_override: Fields that a request may change for itself (see `vllm_kvselect.request`).
            None by default: clients then cannot ask for more memory than the operator planned.
        check_integrity: Whether the scheduler checks all blocks after every step and stops requests
            whose blocks are wrong. For debugging: its cost grows with the cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str = "adakv-perturb"
    budget: int | float = 1024
    decode_budget: Annotated[int, Field(ge=0)] = 0
    decode_interval: Annotated[int, Field(ge=1)] = 128
    keep_prompt: bool = False
    context: Annotated[int, Field(ge=1)] | Literal["chat"] | None = None
    turn_start: tuple[int, ...] = ()
    prefill: Literal["dense", "critiprefill"] = "dense"
    prefill_budget: Annotated[int, Field(ge=1)] = 2048
    prefill_segment: Annotated[int, Field(ge=1)] = 512
    prefill_block: Annotated[int, Field(ge=1)] = 32
    prefill_dense_until: Annotated[int, Field(ge=0)] = 4096
    prefill_dense_layers: Annotated[int, Field(ge=0)] = 1
    prefill_layer_fusion: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25
    prefill_coverage: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    prefill_values: bool = False
    window: Annotated[int, Field(ge=1)] = 32
    kernel_size: Annotated[int, Field(ge=1)] = 7
    pooling: Literal["max", "mean"] = "max"
    group_reduction: Literal["mean", "max"] = "mean"
    alpha: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    eps: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1e-4
    stage_2_scores: Literal["pooled", "unpooled"] = "pooled"
    safeguard: Annotated[float, Field(ge=0.0, le=1.0)] = 0.2
    floor: Literal["blend", "minimum"] = "blend"
    beta: Annotated[int, Field(ge=1)] = 20
    mass: Annotated[float, Field(ge=0.0, le=1.0)] = 0.9
    lam: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    r_kv_lam: Annotated[float, Field(ge=0.0, le=1.0)] = 0.1
    r_kv_threshold: Annotated[float, Field(ge=-1.0, le=1.0)] = 0.5
    future: Annotated[int, Field(ge=1)] = 512
    expected_eps: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.02
    num_sinks: Annotated[int, Field(ge=0)] = 4
    probe: Annotated[str, Field(min_length=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    decode_attention: Literal["backend", "xformers"] = "backend"
    allow_override: tuple[OverrideName, ...] = ()
    check_integrity: bool = False

    @field_validator("method", mode="before")
    @classmethod
    def _method_is_known(cls, method: Any) -> Any:
        if method not in ("none", *KNOWN_METHODS):
            raise ValueError(f"the methods are {', '.join(map(repr, METHOD_NAMES))}")
        return method

    @field_validator("budget")
    @classmethod
    def _budget_in_range(cls, budget: int | float) -> int | float:
        if isinstance(budget, float) and not 0.0 < budget <= 1.0:
            raise ValueError(
                "a fraction of the prompt lies above 0.0 and up to 1.0; for a number of entries "
                "write an integer, such as 1024"
            )
        if isinstance(budget, int) and budget < 1:
            raise ValueError(
                "a number of entries is at least 1; to switch eviction off use method 'none'"
            )
        return budget

    @field_validator("kernel_size")
    @classmethod
    def _kernel_is_odd(cls, kernel_size: int) -> int:
        if kernel_size % 2 == 0:
            raise ValueError("the pooling kernel is centred on a token, so its width is odd")
        return kernel_size

    @field_validator("allow_override", "turn_start", mode="before")
    @classmethod
    def _list_as_a_tuple(cls, values: Any) -> Any:
        # YAML and JSON know lists only; the strict model would refuse them.
        return tuple(values) if isinstance(values, list) else values

    @model_validator(mode="after")
    def _segments_are_whole_blocks(self) -> Self:
        size, block = self.prefill_segment, self.prefill_block
        for name, tokens in (("prefill_segment", size), ("prefill_budget", self.prefill_budget)):
            if tokens % block:
                raise ValueError(
                    f"{name} = {tokens!r} is not accepted with prefill_block = {block!r}: it is no "
                    f"multiple of it; {max(1, tokens // block) * block} would be one"
                )
        return self

    @model_validator(mode="after")
    def _rounds_can_be_made(self) -> Self:
        if not self.decode_budget or not self.enabled:
            return self
        why_not = KNOWN_METHODS[self.method].not_in_rounds
        if why_not:
            able = ", ".join(name for name, method in METHODS.items() if method.in_rounds)
            raise ValueError(
                f"decode_budget = {self.decode_budget!r} is not accepted with method = "
                f"{self.method!r}: {why_not}; set it to 0, or take one of {able}"
            )
        if self.context is not None:
            raise ValueError(
                f"decode_budget = {self.decode_budget!r} is not accepted with context = "
                f"{self.context!r}: rounds would overwrite entries that others read; leave one of "
                "them out"
            )
        return self

    @property
    def enabled(self) -> bool:
        """Whether anything is dropped."""
        return self.method != "none"

    @property
    def may_evict(self) -> bool:
        """Whether a server with these defaults ever drops anything, for some request at least."""
        return self.enabled or "method" in self.allow_override

    @property
    def may_prefill_sparsely(self) -> bool:
        """Whether some request may be prefilled sparsely."""
        return self.prefill != "dense" or "prefill" in self.allow_override

    @property
    def may_act(self) -> bool:
        """Whether a server with these settings ever differs from stock vLLM."""
        return self.may_evict or self.may_prefill_sparsely

    @property
    def may_pool(self) -> bool:
        """Whether some request may run with a method whose layers share pages."""
        if "method" in self.allow_override:
            return True
        return self.enabled and KNOWN_METHODS[self.method].pooled

    @property
    def may_make_rounds(self) -> bool:
        """Whether some request may be cut again while it generates."""
        return self.may_evict and bool(self.decode_budget or "decode_budget" in self.allow_override)

    @property
    def may_share(self) -> bool:
        """Whether some request may mark a context, which others may then read."""
        return self.may_evict and (self.context is not None or "context" in self.allow_override)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates plain values, as they come from YAML, JSON or the command line.

        Args:
            values: Field names and values. Missing fields take their defaults.

        Returns:
            The frozen configuration.

        Raises:
            ConfigError: If a key is unknown or a value is not accepted; the message names the key,
                the offending value and what is accepted.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(_explain(error)) from None

    @classmethod
    def read_file(cls, path: str | Path) -> dict[str, Any]:
        """Reads the values of a YAML file without filling in defaults.

        Args:
            path: File with a mapping of field names to values.

        Returns:
            The mapping, still to be validated by `parse`.

        Raises:
            ConfigError: If the file cannot be read or holds no YAML mapping.
        """
        try:
            values = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path} is not valid YAML{_position(error)}: {getattr(error, 'problem', error)}"
            ) from None
        if not isinstance(values, dict):
            raise ConfigError(
                f"{path} must hold a mapping such as 'method: adakv-perturb', "
                f"not {type(values).__name__}"
            )
        return values


def _position(error: Exception) -> str:
    """Where a file is not valid YAML, where that is known."""
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _explain(error: ValidationError) -> str:
    """One line per problem: the key, the value, what is accepted."""
    lines = []
    for problem in error.errors():
        if not problem["loc"]:  # fields that do not go together: the message says which
            lines.append(problem["msg"].removeprefix("Value error, "))
            continue
        key = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            accepted = ", ".join(EvictionConfig.model_fields)
            lines.append(f"unknown key {key!r}; accepted keys: {accepted}")
            continue
        message = problem["msg"].removeprefix("Value error, ")
        lines.append(f"{key} = {problem['input']!r} is not accepted: {message}")
    return "; ".join(dict.fromkeys(lines))

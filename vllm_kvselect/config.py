"""The one configuration object: frozen, validated once, unknown keys are errors."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializationInfo,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from vllm_kvselect.registry import AUTO, KNOWN_METHODS, METHODS, PARAMETERS, nearest
from vllm_kvselect.scorers import Parameters

METHOD_NAMES: tuple[str, ...] = ("none", *METHODS)

OverrideName = Literal[
    "method",
    "budget",
    "context",
    "decode_budget",
    "decode_interval",
    "prompt_interval",
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


class Prefill(Parameters):
    """How prompts are prefilled.

    Attributes:
        prefill: `critiprefill` lets later tokens of a prompt read only the blocks before them that
            are critical (arXiv 2409.12490); `dense`, the default, all of them, as stock vLLM.
        prefill_budget: Tokens before its segment that such a token reads, in whole blocks.
        prefill_segment: Neighbouring tokens that read the same blocks.
        prefill_block: Tokens of a block that is read or not.
        prefill_dense_until: Tokens at the beginning of the prompt that read all before them.
        prefill_dense_layers: First layers in which all tokens do.
        prefill_layer_fusion: Weight of the layers before in a block's criticality.
    """

    prefill: Literal["dense", "critiprefill"] = "dense"
    prefill_budget: Annotated[int, Field(ge=1)] = 2048
    prefill_segment: Annotated[int, Field(ge=1)] = 512
    prefill_block: Annotated[int, Field(ge=1)] = 32
    prefill_dense_until: Annotated[int, Field(ge=0)] = 4096
    prefill_dense_layers: Annotated[int, Field(ge=0)] = 1
    prefill_layer_fusion: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.25

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


Group = TypeVar("Group", bound=Parameters)

if TYPE_CHECKING:

    class AllParameters(Parameters):
        """Every group of parameters in one flat record, which is an instance of each of them."""

else:
    AllParameters = create_model("AllParameters", __base__=(Prefill, *PARAMETERS[::-1]))


class EvictionConfig(BaseModel):
    """What is retained of a prompt's KV cache once the prompt is prefilled.

    From outside it is flat: `KEYS` has its own fields and those of all groups of parameters. Each
    part reads its own group, `config.of(Pooling).kernel_size`.

    Attributes:
        method: A key of `registry.METHODS`; `none` is stock. Off the engine also one of
            `KNOWN_METHODS`.
        budget: Entries retained per KV head per layer, averaged over a layer's heads, or over those
            of all layers that share pages; observation window included. An `int` counts entries, a
            `float` is a fraction of the prompt, or of its context where that is marked.
        prompt_interval: Tokens of a prompt from one cut in it to the next: entries are dropped
            while it is computed, and its later tokens read what is retained and the latest ones. 0
            drops at the prompt's end only.
        decode_budget: Entries per KV head to which a request is brought back again and again while
            it generates; 0 lets its answer grow. What the prompt left counts, and so does the
            window.
        decode_interval: Tokens from one such round to the next.
        context: Tokens at the beginning of the prompt that are compressed on their own, up to the
            last block border among them: what follows, such as a question, neither shapes what is
            retained of them nor is dropped. `chat`: what comes before the first user's turn that
            leaves something to drop. None: the whole prompt is compressed.
        turn_start: Token ids with which a user's turn begins, for `chat`; empty for what the
            model's chat template says.
        window: Observation window in tokens: the last prompt tokens, whose queries score the
            entries before them. Always retained.
        parameters: What single parts of methods read, and how prompts are prefilled. Those that a
            method does not read are accepted: a request may choose another one.
        decode_attention: Whose kernel attends to what is retained: the attention backend's, or
            xformers' `triton_splitk` (CUDA, extra `xformers`) for rows with one query.
        allow_override: Fields that a request may change for itself (see `vllm_kvselect.request`).
            None by default: clients then cannot ask for more memory than the operator planned.
        context_store: Folder that keeps compressed contexts for later starts and other servers.
        context_store_bytes: Bytes that its files may take; the least recently used ones go.
        check_integrity: Whether the scheduler checks all blocks after every step and stops requests
            whose blocks are wrong. For debugging: its cost grows with the cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: str = "adakv-perturb"
    budget: int | float = 1024
    prompt_interval: Annotated[int, Field(ge=0)] = 0
    decode_budget: Annotated[int, Field(ge=0)] = 0
    decode_interval: Annotated[int, Field(ge=1)] = 128
    context: Annotated[int, Field(ge=1)] | Literal["chat"] | None = None
    turn_start: tuple[int, ...] = ()
    window: Annotated[int, Field(ge=1)] = 32
    parameters: AllParameters = AllParameters()
    decode_attention: Literal["backend", "xformers"] = "backend"
    allow_override: tuple[OverrideName, ...] = ()
    context_store: Annotated[str, Field(min_length=1)] | None = None
    context_store_bytes: Annotated[int, Field(ge=1)] | None = None
    check_integrity: bool = False

    @field_validator("method", mode="before")
    @classmethod
    def _method_is_known(cls, method: Any) -> Any:
        if method == AUTO:
            raise ValueError("only a server can choose by its model; name one of its methods")
        if method not in ("none", *KNOWN_METHODS):
            names = ", ".join(map(repr, METHOD_NAMES))
            raise ValueError(f"{nearest(method, METHOD_NAMES)}the methods are {names}")
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

    @field_validator("allow_override", "turn_start", mode="before")
    @classmethod
    def _list_as_a_tuple(cls, values: Any) -> Any:
        # YAML and JSON know lists only; the strict model would refuse them.
        return tuple(values) if isinstance(values, list) else values

    @model_validator(mode="after")
    def _entries_can_be_dropped_again(self) -> Self:
        if not self.enabled:
            return self
        why_not = KNOWN_METHODS[self.method].not_in_rounds
        for name in ("prompt_interval", "decode_budget"):
            if why_not and getattr(self, name):
                able = ", ".join(name for name, method in METHODS.items() if method.in_rounds)
                raise ValueError(
                    f"{name} = {getattr(self, name)!r} is not accepted with method = "
                    f"{self.method!r}: {why_not}; set it to 0, or take one of {able}"
                )
        if self.prompt_interval and self.of(Prefill).prefill != "dense":
            raise ValueError(
                f"prompt_interval = {self.prompt_interval!r} is not accepted with prefill = "
                f"{self.of(Prefill).prefill!r}: sparse segments choose among all tokens before "
                "them, and cuts in prompts drop these; leave one of them out"
            )
        if self.decode_budget and self.context is not None:
            raise ValueError(
                f"decode_budget = {self.decode_budget!r} is not accepted with context = "
                f"{self.context!r}: rounds would overwrite entries that others read; leave one of "
                "them out"
            )
        return self

    @model_validator(mode="after")
    def _there_is_a_store_to_bound(self) -> Self:
        if self.context_store_bytes is not None and self.context_store is None:
            raise ValueError(
                f"context_store_bytes = {self.context_store_bytes!r} bounds nothing: give "
                "context_store a folder, too"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _parameters_together(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if "parameters" in values:
            raise ValueError(_unknown("parameters"))
        own = {key: value for key, value in values.items() if key not in _PARAMETERS}
        given = {key: value for key, value in values.items() if key in _PARAMETERS}
        return {**own, "parameters": given}

    @model_serializer(mode="wrap")
    def _flat(
        self, handler: SerializerFunctionWrapHandler, info: SerializationInfo
    ) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        parameters = values.pop("parameters", {})
        excluded = info.exclude or ()
        return values | {key: it for key, it in parameters.items() if key not in excluded}

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copies, with changes that are not validated; parameters are named as in `KEYS`."""
        changes = dict(update or {})
        given = {key: changes.pop(key) for key in [*changes] if key in _PARAMETERS}
        if given:
            changes["parameters"] = self.parameters.model_copy(update=given)
        return super().model_copy(update=changes, deep=deep)

    def of(self, group: type[Group]) -> Group:
        """What a part reads: the values of one group of parameters."""
        assert isinstance(self.parameters, group)
        return self.parameters

    if (
        not TYPE_CHECKING
    ):  # checked code asks for groups: a misspelt name is an error before it runs

        def __getattr__(self, name: str) -> Any:
            """Reads a parameter by its name alone, as it stands in `KEYS`."""
            if name in _PARAMETERS:
                return getattr(self.parameters, name)
            return super().__getattr__(name)

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
        is_sparse = self.of(Prefill).prefill != "dense"
        return is_sparse or "prefill" in self.allow_override

    @property
    def may_act(self) -> bool:
        """Whether a server with these settings ever differs from stock vLLM."""
        return self.may_evict or self.may_prefill_sparsely

    @property
    def may_make_rounds(self) -> bool:
        """Whether some request may be cut again while it generates."""
        return self.may_evict and bool(self.decode_budget or "decode_budget" in self.allow_override)

    @property
    def may_cut_prompts(self) -> bool:
        """Whether some request may be cut while its prompt is computed."""
        allowed = "prompt_interval" in self.allow_override
        return self.may_evict and bool(self.prompt_interval or allowed)

    @property
    def may_drop_again(self) -> bool:
        """Whether some request may have several cuts."""
        return self.may_make_rounds or self.may_cut_prompts

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


def keys() -> dict[str, FieldInfo]:
    """Every key of the configuration, parameters of all groups among them."""
    own = {name: info for name, info in EvictionConfig.model_fields.items() if name != "parameters"}
    return own | AllParameters.model_fields


_PARAMETERS = frozenset(AllParameters.model_fields)
KEYS: tuple[str, ...] = tuple(keys())
"""What a file, `--additional-config` and `EvictionConfig.parse` accept."""


def _position(error: Exception) -> str:
    """Where a file is not valid YAML, where that is known."""
    mark = getattr(error, "problem_mark", None)
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""


def _explain(error: ValidationError) -> str:
    """One line per problem: the key, the value, what is accepted."""
    lines = []
    for problem in error.errors():
        message = problem["msg"].removeprefix("Value error, ")
        place = [part for part in problem["loc"] if part != "parameters"]
        if not place:  # fields that do not go together: the message says which
            lines.append(message)
            continue
        key = str(place[0])
        if problem["type"] == "extra_forbidden":
            lines.append(_unknown(key))
            continue
        lines.append(f"{key} = {problem['input']!r} is not accepted: {message}")
    return "; ".join(dict.fromkeys(lines))


def _unknown(key: str) -> str:
    return f"unknown key {key!r}; {nearest(key, KEYS)}accepted keys: {', '.join(KEYS)}"

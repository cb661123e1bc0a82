"""The one configuration object: frozen, validated once, unknown keys are errors."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
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

from vllm_kvselect.registry import AUTO, AUTO_INTERVAL, KNOWN_METHODS, METHODS, PARAMETERS, nearest
from vllm_kvselect.scorers import Parameters
from vllm_kvselect.settings import Setting

METHOD_NAMES: tuple[str, ...] = ("none", *METHODS)

CONFIG_KEY = "kv_eviction"
"""Key of this configuration in `VllmConfig.additional_config`."""


class ConfigError(ValueError):
    """A configuration that cannot be honoured: names the value, the accepted ones, the remedy."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: PyYAML alone reads `1e-4`, without a point, as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _may_be_chosen(name: str) -> str:
    """A setting that a request may choose."""
    if name not in OVERRIDE_NAMES:
        raise ValueError(f"{nearest(name, OVERRIDE_NAMES)}it is one of {', '.join(OVERRIDE_NAMES)}")
    return name


class Prefill(Parameters):
    """How prompts are prefilled (CritiPrefill, arXiv 2409.12490)."""

    prefill: Annotated[
        Literal["dense", "critiprefill"],
        Setting(
            "What the tokens of long prompts read: all tokens before them ('dense'), or the "
            "critical blocks alone ('critiprefill'), which is faster and may change answers.",
            operator=True,
            option="dense|critiprefill",
            in_requests=True,
        ),
    ] = "dense"
    prefill_budget: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Tokens in the blocks that a segment of a sparsely prefilled prompt reads.",
            operator=True,
            option="TOKENS",
            in_requests=True,
        ),
    ] = 2048
    prefill_segment: Annotated[
        int, Field(ge=1), Setting("Neighbouring tokens that read the same blocks.")
    ] = 512
    prefill_block: Annotated[int, Field(ge=1), Setting("Tokens of such a block.")] = 32
    prefill_dense_until: Annotated[
        int,
        Field(ge=0),
        Setting("First tokens of a prompt that read all before them.", option="TOKENS"),
    ] = 4096
    prefill_dense_layers: Annotated[
        int, Field(ge=0), Setting("First layers in which all tokens do.")
    ] = 1
    prefill_layer_fusion: Annotated[
        float,
        Field(ge=0.0, lt=1.0),
        Setting("How much the layers before count in what is critical."),
    ] = 0.25

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

    An `int` and the `float` that equals it are different budgets: an int counts entries, a float is
    a fraction of the prompt, or of its context where that is marked. Parameters that the method
    does not read are accepted: a request may choose another one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    method: Annotated[
        str,
        Setting(
            "How the entries to keep are chosen: by a method of `vllm-kvselect methods`, by the "
            "best that the model allows ('auto'), or not at all ('none', stock vLLM).",
            operator=True,
            option="METHOD",
            in_requests=True,
            otherwise="auto with another of these options, else none",
        ),
    ]
    budget: Annotated[
        int | float,
        Setting(
            "What a KV head keeps of a prompt in each layer, on average over the heads: a number "
            "of entries (1024), or a fraction of the prompt (0.25).",
            operator=True,
            option="ENTRIES|FRACTION",
            in_requests=True,
        ),
    ] = 1024
    prompt_interval: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Tokens after which a prompt is cut to the budget while it is still computed. It never "
            "holds more than the budget and two intervals, and the next turn of a chat goes on "
            "from the last cut. 0 cuts it at its end alone.",
            operator=True,
            option="TOKENS",
            in_requests=True,
            otherwise=f"{AUTO_INTERVAL} where auto takes layer-probe, else 0",
        ),
    ] = 0
    keep_first: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Setting(
            "First tokens of a prompt that every head keeps, such as a system prompt. They count "
            "in the budget.",
            option="TOKENS",
            in_requests=True,
            otherwise="4 with probes and `streaming-llm`, else 0",
        ),
    ] = None
    least: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Entries that a cut inside a prompt keeps at least, where the budget is a fraction.",
            option="ENTRIES",
        ),
    ] = 1024
    decode_budget: Annotated[
        int,
        Field(ge=0),
        Setting(
            "Entries to which a request is brought back again and again while it generates; 0 "
            "lets its answer grow.",
            operator=True,
            option="ENTRIES",
            in_requests=True,
        ),
    ] = 0
    decode_interval: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Tokens of an answer from one of these cuts to the next.",
            option="TOKENS",
            in_requests=True,
        ),
    ] = 128
    context: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Setting(
            "First tokens of each prompt that are compressed by themselves, once for all requests "
            "that have them.",
            operator=True,
            option="TOKENS",
            in_requests=True,
            otherwise="the whole prompt, not shared",
        ),
    ] = None
    window: Annotated[
        int,
        Field(ge=1),
        Setting(
            "Last tokens of a prompt. They are always kept, and window methods score all others by "
            "what these attend to.",
            option="TOKENS",
        ),
    ] = 32
    parameters: AllParameters = AllParameters()
    decode_attention: Annotated[
        Literal["backend", "xformers"],
        Setting(
            "Whose kernel attends to what is kept: the attention backend's, or `triton_splitk` of "
            "xformers (CUDA, extra `xformers`)."
        ),
    ] = "backend"
    allow_override: Annotated[
        tuple[Annotated[str, AfterValidator(_may_be_chosen)], ...],
        Setting(
            "What requests may choose for themselves, with blanks or commas between.",
            operator=True,
            option="SETTING",
            otherwise="nothing",
        ),
    ] = ()
    context_store: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Setting(
            "Folder that keeps compressed contexts for later starts and other servers.",
            operator=True,
            option="FOLDER",
            otherwise="contexts live in the KV cache alone",
        ),
    ] = None
    context_store_bytes: Annotated[
        Annotated[int, Field(ge=1)] | None,
        Setting(
            "Bytes that its files may take, such as 50G; the least recently used ones go.",
            operator=True,
            option="BYTES",
            otherwise="no bound",
        ),
    ] = None
    check_integrity: Annotated[
        bool,
        Setting(
            "Check all blocks of the KV cache after every step, and stop requests whose blocks are "
            "wrong. For debugging: the cost grows with the cache.",
            option="",
            otherwise="off",
        ),
    ] = False

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

    @field_validator("context", mode="before")
    @classmethod
    def _chats_have_states(cls, context: Any) -> Any:
        if context == "chat":
            raise ValueError(
                "with prompt_interval each turn of a chat goes on from what was compressed; leave "
                "context out"
            )
        return context

    @field_validator("allow_override", mode="before")
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

    # Checked code asks for groups: a misspelt name is an error before it runs.
    if not TYPE_CHECKING:

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
    def num_first(self) -> int:
        """First tokens that every head keeps, whatever is said of them."""
        if self.keep_first is not None or not self.enabled:
            return self.keep_first or 0
        return KNOWN_METHODS[self.method].scorer.num_first

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

        Missing fields take their defaults.

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
        """Reads the values of a YAML file without filling in defaults, still to be validated.

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


def with_a_method(values: dict[str, Any]) -> dict[str, Any]:
    """Settings as a server reads them: where no method is named, `auto` chooses one.

    A sparse prefill alone drops nothing, so where nothing is said but of the prefill, it is `none`.

    Raises:
        ConfigError: If they are of a sparse prefill that nobody asks for.
    """
    of_prefill = [name for name in values if name.startswith("prefill")]
    others = values.keys() - {*of_prefill, "allow_override", "check_integrity"}
    if others or not of_prefill:
        return {"method": AUTO, **values}
    if "prefill" not in (*of_prefill, *values.get("allow_override", ())):
        name = of_prefill[0]
        raise ConfigError(
            f"{name} = {values[name]!r} has no effect without prefill; set that to 'critiprefill'"
        )
    return {"method": "none", **values}


def keys() -> dict[str, FieldInfo]:
    """Every key of the configuration, parameters of all groups among them."""
    own = {name: info for name, info in EvictionConfig.model_fields.items() if name != "parameters"}
    return own | AllParameters.model_fields


_PARAMETERS = frozenset(AllParameters.model_fields)
KEYS: tuple[str, ...] = tuple(keys())
"""What a file, `--additional-config` and `EvictionConfig.parse` accept."""

SETTINGS: dict[str, Setting] = {
    name: next(each for each in info.metadata if isinstance(each, Setting))
    for name, info in keys().items()
}
"""The table of all settings: what each field says of itself."""

OVERRIDE_NAMES: tuple[str, ...] = tuple(
    name for name, setting in SETTINGS.items() if setting.in_requests
)
"""Fields that a request may change, where the server allows it."""


def words(name: str) -> tuple[str, ...]:
    """The words that a setting is one of, or some of; none where it takes others."""
    return OVERRIDE_NAMES if name == "allow_override" else tuple(_words(keys()[name].annotation))


def _words(annotation: Any) -> Iterator[str]:
    for part in get_args(annotation):
        if get_origin(annotation) is Literal:
            yield part
        else:
            yield from _words(part)


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
        if problem["type"] == "missing":
            lines.append(f"{key} is missing; it is one of {', '.join(METHOD_NAMES)}")
            continue
        lines.append(f"{key} = {problem['input']!r} is not accepted: {message}")
    return "; ".join(dict.fromkeys(lines))


def _unknown(key: str) -> str:
    return f"unknown key {key!r}; {nearest(key, KEYS)}accepted keys: {', '.join(KEYS)}"

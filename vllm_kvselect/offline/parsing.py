"""Settings of studies, evaluations and calibrations, from plain values and from command lines."""

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo
from typer.models import ParameterInfo

from vllm_kvselect.offline.errors import EvaluationError


class Settings(BaseModel):
    """Settings that are validated once: frozen, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates plain values, as they come from the command line.

        Raises:
            EvaluationError: If a value is not accepted; names every one.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            problems = (
                f"{'.'.join(map(str, each['loc']))} = {each['input']!r}: {each['msg']}"
                for each in error.errors()
            )
            raise EvaluationError("; ".join(problems)) from None


def with_options(settings: type[BaseModel]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command the fields of settings for options, those that say how they are shown.

    Lists are written with commas. The command gets their values by name in one mapping, and then
    options of its own.
    """
    fields = {name: info for name, info in settings.model_fields.items() if _shown(info)}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_values(**given: Any) -> None:
            values = {name: _value(info, given.pop(name)) for name, info in fields.items()}
            command(values, **given)

        _, *own = inspect.signature(command).parameters.values()
        options = [_option(name, info) for name, info in fields.items()] + own
        keywords = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in options]
        with_values.__signature__ = inspect.Signature(keywords)  # type: ignore[attr-defined]
        return with_values

    return decorate


def _shown(field: FieldInfo) -> ParameterInfo | None:
    return next((each for each in field.metadata if isinstance(each, ParameterInfo)), None)


def _option(name: str, field: FieldInfo) -> inspect.Parameter:
    """A field as a parameter of a command: lists and words are strings there."""
    kind, default = field.annotation, field.default
    if get_origin(kind) is tuple:
        default = ",".join(map(str, default))
    if get_origin(kind) in (tuple, Literal):
        kind = str
    default = inspect.Parameter.empty if field.is_required() else default
    annotation = Annotated[kind, _shown(field)]  # type: ignore[valid-type]
    place = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, place, default=default, annotation=annotation)


def _value(field: FieldInfo, given: Any) -> Any:
    """What was given for a field, as its model takes it."""
    if get_origin(field.annotation) is not tuple:
        return given
    is_text = get_args(field.annotation)[0] is str
    return [part if is_text else parse_number(part) for part in parts(given)]


def refuse_context(eviction: dict[str, Any]) -> None:
    """Refuses a marked context among the settings of methods, beside scenarios.

    Raises:
        EvaluationError: If it is there; says what to do.
    """
    if "context" in eviction:
        raise EvaluationError(
            "the scenario says what is compressed: leave context out, and add --scenarios "
            "context-only"
        )


def parse_number(text: str) -> int | float | str:
    """Reads a number as YAML would; what is none is left for a configuration to refuse."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parts(text: str) -> list[str]:
    """Splits a list that is written with commas."""
    return [part.strip() for part in text.split(",") if part.strip()]


def variant(text: str) -> tuple[str, dict[str, Any]]:
    """Reads a method and what is changed of it: `thetakv`, or `thetakv:lam=0.0:alpha=1.0`.

    Raises:
        EvaluationError: If a change is not of the form `name=value`.
    """
    method, *changes = text.split(":")
    return method, dict(map(assignment, changes))


def assignment(text: str) -> tuple[str, Any]:
    """Reads `name=value`, the value as `parse_number` does.

    Raises:
        EvaluationError: If it is of another form.
    """
    name, equals, value = text.partition("=")
    if not equals:
        raise EvaluationError(f"{text!r} is not of the form name=value")
    return name, parse_number(value)

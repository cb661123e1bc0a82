"""Settings of studies, evaluations and calibrations, from plain values and from command lines."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_kvselect.offline.errors import EvaluationError

Settings = TypeVar("Settings", bound=BaseModel)


def parsed(settings: type[Settings], values: dict[str, Any]) -> Settings:
    """Validates plain values, as they come from the command line.

    Args:
        settings: A frozen model that refuses unknown keys.
        values: Field names and values.

    Returns:
        The settings.

    Raises:
        EvaluationError: If a value is not accepted; names every one.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        problems = (
            f"{'.'.join(map(str, each['loc']))} = {each['input']!r}: {each['msg']}"
            for each in error.errors()
        )
        raise EvaluationError("; ".join(problems)) from None


def refuse_context(eviction: dict[str, Any]) -> None:
    """Refuses a marked context among the settings of methods, beside scenarios.

    Args:
        eviction: Fields of `EvictionConfig`.

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

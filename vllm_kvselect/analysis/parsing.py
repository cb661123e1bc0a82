"""Settings of studies, evaluations and calibrations from plain values."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from vllm_kvselect.analysis.errors import EvaluationError

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

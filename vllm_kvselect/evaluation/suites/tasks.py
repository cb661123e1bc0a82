"""Tasks of a suite, by name."""

from collections.abc import Iterable

from vllm_kvselect.offline.errors import EvaluationError


def chosen(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Returns the tasks that are asked for, all of them if none is.

    Args:
        names: What is asked for.
        known: What there is.

    Returns:
        The names in the order that was asked for.

    Raises:
        EvaluationError: If one is unknown.
    """
    names, known = list(names), list(known)
    for name in names:
        if name not in known:
            raise EvaluationError(f"no task {name!r}; there are {', '.join(known)}")
    return names or known

"""The error of this part."""


class EvaluationError(RuntimeError):
    """An evaluation that cannot go on: says why and what to do."""

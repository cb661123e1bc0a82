"""Scores: predictions beside right answers, averaged, and compared with the full cache."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.metrics import ENDED, LIKE_FULL, METRICS, READ_ALONG, agreement
from vllm_kvselect.evaluation.predictions import Budget, Prediction
from vllm_kvselect.evaluation.settings import FULL
from vllm_kvselect.offline.intervals import Interval, interval

SOLVED = 0.5
"""A task counts in a mean if the full cache scores more: what it cannot do, nothing can lose. One
without a right answer to find always does."""

_MEASURES = ("score", "nll", "accuracy", "tokens")
_SETTING = ["scenario", "length", "method", "budget_text", "through"]


@dataclass(frozen=True)
class Mean:
    """A mean over tasks that weigh the same, and how far it lies from that of another method.

    Attributes:
        value: The mean.
        difference: To the other method on the same examples; None for that method itself.
        interval: Bootstrap interval of the difference over the examples of each task; None where a
            task has a single example, which says nothing about others.
    """

    value: float
    difference: float | None = None
    interval: Interval | None = None


@dataclass(frozen=True)
class Row:
    """What a setting reached at a length.

    Attributes:
        scenario: As in `Prediction`, with what follows.
        length: Length that was asked for.
        method: The method.
        budget: Its budget.
        through: Who answered.
        against: The method that differences are to.
        retained: Mean share of the entries that were retained.
        scores: Mean score by task, 0 to 1.
        num_examples: Examples by task.
        solved: Tasks that count in the means.
        score: Of the tasks that the full cache solves; None if it solves none.
        nll: Negative log-likelihood of their right answers, in nats per token; None where it was
            not measured.
        accuracy: Share of the right answers' tokens that are the likeliest, or None.
        tokens: Of answers that the model ends itself, or None.
    """

    scenario: str
    length: int
    method: str
    budget: Budget | None
    through: str
    against: str
    retained: float
    scores: Mapping[str, float]
    num_examples: Mapping[str, int]
    solved: tuple[str, ...]
    score: Mean | None
    nll: Mean | None
    accuracy: Mean | None
    tokens: Mean | None


def scored(
    examples: Iterable[Example], predictions: Iterable[Prediction], against: str = FULL
) -> pd.DataFrame:
    """Scores predictions, and puts the numbers of one method beside them.

    It is that of the same scenario and way of answering; where that was not measured, of any way:
    prompts and right answers are the same. Any but the full cache is that at the same budget.
    Predictions of other examples are left out; of two of one example in one setting the later one
    counts.

    Returns:
        A line a prediction: the fields of `Prediction`; `task`, `length` and `depth`;
        `budget_text`, the budget with its type; `score`; `solved`, whether the task counts;
        `tokens`, the answer's length where the model ends it itself; of the other method
        `base_score`, `base_nll`, `base_accuracy` and `base_tokens`, NaN where they were not
        measured; `against`.
    """
    by_name = {example.name: example for example in examples}
    known = [vars(each) for each in predictions if each.example in by_name]
    frame = pd.DataFrame(known, columns=list(Prediction.__dataclass_fields__))
    # As text, because 1 entry is not 1.0, all of the prompt.
    frame["budget_text"] = [str(each["budget"]) for each in known]
    setting = ["example", "scenario", "method", "budget_text", "through"]
    frame = frame.drop_duplicates(setting, keep="last").astype({"nll": float, "accuracy": float})
    for name in ("task", "length", "depth"):
        frame[name] = [getattr(by_name[each], name) for each in frame["example"]]
    metrics = pd.Series([by_name[name].metric for name in frame["example"]], frame.index)
    frame["tokens"] = frame["num_tokens"].where(metrics == ENDED).astype(float)
    columns = (frame["example"], frame["text"], _beside(frame, "text", FULL))
    measures = (frame["accuracy"], frame["num_tokens"])
    frame["score"] = [
        _score(by_name[name], *each) for name, *each in zip(*columns, *measures, strict=True)
    ]
    for name in _MEASURES:
        frame[f"base_{name}"] = _beside(frame, name, against)
    full = frame[frame["method"] == FULL].groupby(["scenario", "length", "task"])["score"].mean()
    solved = full[full > SOLVED].index
    cells = pd.MultiIndex.from_frame(frame[["scenario", "length", "task"]])
    solved = cells.isin(solved) | metrics.isin((ENDED, READ_ALONG))
    return frame.assign(solved=solved, against=against)


def rows(frame: pd.DataFrame) -> list[Row]:
    """Averages scored predictions by setting and length, in the order in which they come."""
    return [_row(group) for _, group in frame.groupby(_SETTING, sort=False)]


def _beside(frame: pd.DataFrame, name: str, method: str) -> pd.Series:
    """A method's value for every line."""
    keys = ["scenario", "example", *([] if method == FULL else ["budget_text"])]
    base = frame[frame["method"] == method]
    found = _lookup(base, frame, [*keys, "through"], name)
    return found.where(found.notna(), _lookup(base, frame, keys, name))


def _lookup(base: pd.DataFrame, frame: pd.DataFrame, keys: list[str], name: str) -> pd.Series:
    values = base.drop_duplicates(keys).set_index(keys)[name]
    return values.reindex(pd.MultiIndex.from_frame(frame[keys])).set_axis(frame.index)


def _score(
    example: Example, text: str, full: str | float, accuracy: float, num_tokens: int
) -> float:
    if example.metric == READ_ALONG:
        return accuracy
    if example.metric == ENDED:
        return float(num_tokens < example.max_tokens)
    if example.metric != LIKE_FULL:
        return METRICS[example.metric](text, example.references, example.classes)
    return agreement(text, full)["rouge_l"] if isinstance(full, str) else float("nan")


def _row(group: pd.DataFrame) -> Row:
    by_task = group.groupby("task", sort=False)["score"]
    counted = group[group["solved"]]
    first = group.iloc[0]
    return Row(
        scenario=first["scenario"],
        length=int(first["length"]),
        method=first["method"],
        budget=_budget(first["budget_text"]),
        through=first["through"],
        against=first["against"],
        retained=float(group["retained"].mean()),
        scores=by_task.mean().to_dict(),
        num_examples=by_task.size().to_dict(),
        solved=tuple(counted["task"].unique()),
        **{name: _mean(counted, name) for name in _MEASURES},
    )


def _budget(text: str) -> Budget | None:
    if text == "None":
        return None
    return int(text) if text.isdecimal() else float(text)


def _mean(counted: pd.DataFrame, name: str) -> Mean | None:
    """Mean over the tasks of their means, or None if nothing counts or it was not measured."""
    if counted.empty or counted[name].isna().any():
        return None
    by_task = counted.groupby("task", sort=False)
    value = float(by_task[name].mean().mean())
    is_base = (counted["method"] == counted["against"]).all()
    if is_base or counted[f"base_{name}"].isna().any():
        return Mean(value)
    differences = counted[name] - counted[f"base_{name}"]
    samples = [part.to_numpy(float) for _, part in differences.groupby(counted["task"])]
    return Mean(value, _mean_of_means(*samples), interval(samples, _mean_of_means))


def _mean_of_means(*samples: np.ndarray, axis: int = -1) -> float:
    return np.mean([sample.mean(axis=axis) for sample in samples], axis=0)

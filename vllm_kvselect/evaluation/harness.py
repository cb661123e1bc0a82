"""lm-evaluation-harness against the served engine: its own tasks, prompts and metrics."""

import json
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lm_eval
from aiohttp import ClientError
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import handle_non_serializable

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.evaluation.endpoint import (
    PROMPTS_AT_ONCE,
    Endpoint,
    Needs,
    endpoint,
    full_cache,
    request_settings,
)
from vllm_kvselect.evaluation.harness_tasks import Prepared, prepare
from vllm_kvselect.evaluation.predictions import Setting
from vllm_kvselect.evaluation.served import retained_share
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.models import load_tokenizer, model_folder

if TYPE_CHECKING:
    from lm_eval.result_schema import EvalResults

_A_DAY = 86_400


@dataclass(frozen=True)
class HarnessScore:
    """What lm-evaluation-harness says of one task in one setting.

    Attributes:
        task: The task.
        metric: Its name there; RULER's tasks call it by the length of the prompts, `4096`.
        filter: What was done to answers first, `none` for nothing.
        setting: What was measured.
        value: The score.
        num_prompts: Prompts that it is the mean of.
        retained: Entries retained over all entries, mean over the prompts.
    """

    task: str
    metric: str
    filter: str
    setting: Setting
    value: float
    num_prompts: int
    retained: float


def run(config: EvaluationConfig, done: Container[Setting] = ()) -> Iterator[list[HarnessScore]]:
    """Evaluates one setting after the other on one server.

    Results and samples are written to `config.out`, as lm-evaluation-harness gives them.

    Args:
        config: Tasks, model or server, methods and budgets.
        done: Settings that are left out.

    Yields:
        The scores of a setting. By then the server's metrics have confirmed that it dropped what it
        was asked to.

    Raises:
        EvaluationError: If tasks or server cannot be used, or the server did not drop what it was
            asked to.
    """
    prepared = prepare(config, load_tokenizer(config.model))
    # One more: lm-evaluation-harness keeps a place free, and cuts the front of longer prompts off.
    max_model_len = prepared.longest + 1
    evictions = [full_cache(config), *config.evictions()]
    with endpoint(config, Needs(max_model_len, PROMPTS_AT_ONCE * max_model_len)) as served:
        for setting, eviction in zip(config.settings("regular"), evictions, strict=True):
            if setting in done:
                continue
            results = _evaluate(config, prepared, served, eviction)
            served.cuts.check()
            _write(results, setting, config.out)
            yield _scores(results, prepared, setting, eviction, served.cuts.block_size)


class _Completions(LocalCompletionsAPI):
    """lm-evaluation-harness's client, which takes note of what it was answered.

    Args:
        served: The server.
        eviction: What is asked for.
        **settings: As lm-evaluation-harness's client takes them.
    """

    def __init__(self, served: Endpoint, eviction: EvictionConfig, **settings: Any) -> None:
        super().__init__(model=served.model, base_url=f"{served.url}/v1/completions", **settings)
        self._cuts, self._eviction = served.cuts, eviction

    def parse_generations(self, outputs: dict[str, Any], **kwargs: Any) -> list[str]:
        """Takes note of the lengths by the server's own count."""
        usage = outputs["usage"]
        self._cuts.note(usage["prompt_tokens"], usage["completion_tokens"], self._eviction)
        found: list[str] = super().parse_generations(outputs, **kwargs)
        return found


def _evaluate(
    config: EvaluationConfig, prepared: Prepared, served: Endpoint, eviction: EvictionConfig
) -> "EvalResults":
    client = _Completions(
        served,
        eviction,
        tokenizer=model_folder(config.model),
        tokenizer_backend="huggingface",
        max_length=served.max_model_len,
        num_concurrent=PROMPTS_AT_ONCE,
        max_retries=1,  # a request that was sent twice would be counted twice
        timeout=_A_DAY,
    )
    # Some tasks name a temperature beside `do_sample: false`, which would then be used.
    asked = {"vllm_xargs": request_settings(eviction), "temperature": 0.0, "do_sample": False}
    if config.max_tokens:
        asked["max_gen_toks"] = config.max_tokens
    for task in prepared.tasks.values():
        task.set_config("generation_kwargs", asked, update=True)
        task.set_fewshot_seed(config.seed)
    try:
        return lm_eval.evaluate(
            client,
            {"tasks": prepared.tasks, "groups": {}},
            samples=prepared.documents,
            bootstrap_iters=0,
        )
    except (ClientError, OSError, ValueError) as error:
        raise EvaluationError(
            f"lm-evaluation-harness gives up with {eviction.method}: {error!r}; read what it and "
            "the server said"
        ) from error


def _scores(
    results: "EvalResults",
    prepared: Prepared,
    setting: Setting,
    eviction: EvictionConfig,
    block_size: int,
) -> list[HarnessScore]:
    """The numbers of all tasks; what no document was measured by is left out."""
    found = []
    for task, measured in results["results"].items():
        for key, value in measured.items():
            metric, _, filtered = key.partition(",")
            # A length that a document of RULER does not have is -1 there.
            prompts = [
                sample["arguments"][0][0]
                for sample in results["samples"][task]
                if sample["filter"] == filtered and sample.get(metric, -1) != -1
            ]
            if not filtered or metric.endswith("_stderr") or not prompts:
                continue
            shares = [
                retained_share(prepared.prompt_lens[prompt], block_size, eviction)
                for prompt in prompts
            ]
            num_prompts = len(prompts)
            retained = sum(shares) / num_prompts
            found.append(
                HarnessScore(task, metric, filtered, setting, value, num_prompts, retained)
            )
    return found


def _write(results: "EvalResults", setting: Setting, out: Path) -> None:
    """Writes what lm-evaluation-harness gave, samples line by line in a file of their own."""
    name = setting.method if setting.budget is None else f"{setting.method}-{setting.budget}"
    folder = out / "harness"
    folder.mkdir(parents=True, exist_ok=True)
    summary = {key: value for key, value in results.items() if key != "samples"}
    (folder / f"{name}.json").write_text(_json(summary) + "\n", encoding="utf-8")
    samples = [
        {"task": task, **sample} for task, found in results["samples"].items() for sample in found
    ]
    lines = "".join(_json(sample) + "\n" for sample in samples)
    (folder / f"{name}-samples.jsonl").write_text(lines, encoding="utf-8")


def _json(value: Any) -> str:
    return json.dumps(value, default=handle_non_serializable, ensure_ascii=False)

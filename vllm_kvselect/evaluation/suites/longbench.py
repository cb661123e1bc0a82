"""LongBench: 16 sets of questions about long English texts, with their official metrics."""

from typing import TYPE_CHECKING

from vllm_kvselect.evaluation.examples import Example
from vllm_kvselect.evaluation.settings import EvaluationConfig
from vllm_kvselect.evaluation.suites.longbench_files import Row, Task, read_rows, read_task
from vllm_kvselect.evaluation.suites.tasks import chosen
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.tiny_model import tiny_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METRIC_OF = {
    "narrativeqa": "qa_f1",
    "qasper": "qa_f1",
    "multifieldqa_en": "qa_f1",
    "hotpotqa": "qa_f1",
    "2wikimqa": "qa_f1",
    "musique": "qa_f1",
    "gov_report": "rouge_l",
    "qmsum": "rouge_l",
    "multi_news": "rouge_l",
    "trec": "classification_first_line",
    "triviaqa": "qa_f1_first_line",
    "samsum": "rouge_l_first_line",
    "passage_count": "count",
    "passage_retrieval_en": "retrieval",
    "lcc": "edit_similarity",
    "repobench-p": "edit_similarity",
}
"""Metric of every set, as in the official script."""


def longbench(config: EvaluationConfig, tokenizer: "PreTrainedTokenizerBase") -> list[Example]:
    """Makes the first examples of every set.

    Prompts and answer lengths are lm-eval's. Its prompts are the official ones up to white space:
    it leaves out what stands after the last word (passage_count, passage_retrieval_en, lcc,
    repobench-p) and an empty line before the question (triviaqa, samsum). An answer goes on after
    its first line, though the metrics of trec, triviaqa and samsum know of no other. No set gets a
    chat template, which the official script leaves away for the few-shot and the code sets only.

    The text and its question are tokenised apart, so that the question never is part of what
    context-only compresses. A prompt that is too long loses tokens in its middle, as in the
    official script: half of the room is the prompt's beginning, the other half its end. The
    question is never cut: if it is longer than half of the room, the text's beginning gets the
    rest. `tasks` are sets, `data` a folder in the official layout, `lengths` at most one: prompt
    and answer together, by default the model's positions.

    Raises:
        EvaluationError: If a set is unknown, prompts or data cannot be read, or a length leaves no
            room.
    """
    names = chosen(config.tasks, METRIC_OF)
    length = _length(config)
    examples = []
    for name in names:
        task = read_task(name)
        max_tokens = config.max_tokens or task.max_tokens
        for index, row in enumerate(read_rows(task, config.data, config.num_examples)):
            context, question = _prompt(tokenizer, task, row, length - max_tokens)
            examples.append(
                Example(
                    name=f"{name}/{length}/{index}",
                    task=name,
                    length=length,
                    context=context,
                    question=question,
                    references=row.answers,
                    metric=METRIC_OF[name],
                    max_tokens=max_tokens,
                    classes=row.classes,
                )
            )
    return examples


def _length(config: EvaluationConfig) -> int:
    """Tokens that a prompt and its answer may have."""
    if len(config.lengths) > 1:
        raise EvaluationError("LongBench's texts have lengths of their own: give one, the largest")
    if config.lengths:
        return config.lengths[0]
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(config.model or tiny_model()).get_text_config()
    positions = getattr(shape, "max_position_embeddings", None)
    if positions is None:
        raise EvaluationError(f"{config.model} does not say how many positions it has: --lengths")
    return int(positions)


def _prompt(
    tokenizer: "PreTrainedTokenizerBase", task: Task, row: Row, room: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The text and its question as token ids, together `room` at most."""

    def encode(text: str) -> list[int]:
        # Not verbose: it would warn of the very texts that are cut below.
        return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))

    before, after = task.texts(row)
    begin = tokenizer.encode("")  # a BOS token, where the model wants one
    context, question = [*begin, *encode(before)], encode(after)
    if room <= len(question):
        raise EvaluationError(
            f"{task.name}: {room} tokens for a prompt are too few for a question of "
            f"{len(question)}: choose a larger length, or fewer --max-tokens"
        )
    return tuple(_without_middle(context, room, len(question))), tuple(question)


def _without_middle(context: list[int], room: int, num_question: int) -> list[int]:
    if len(context) + num_question <= room:
        return context
    half = room // 2
    num_last = max(0, half - num_question)
    num_first = min(half, room - num_question)
    return context[:num_first] + context[len(context) - num_last :]

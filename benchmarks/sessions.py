"""Agents that grow turn by turn: stock vLLM with its prefix cache, and the plugin, same bytes.

Each agent sends its whole history again with every turn, one agent after the other. What a cache
could not hold is computed anew. Each turn tells a number; when all have grown, each is asked for.
The last line of the output is one JSON object with every setting and version.
"""

import json
import random
import re
import time
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, NamedTuple

import typer
from _engine import (
    Job,
    ask,
    bytes_of_tokens,
    default_model,
    describe,
    empty_prefix_cache,
    engine_arguments,
    run_child,
    run_script,
)
from _texts import plain_prompts
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.parsing import parse_number
from vllm_kvselect.offline.tables import console as table_console

_INTRODUCTION = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. "
    "I will quiz you about the numbers afterwards.\n"
)
_WORDS = "apple bridge candle dragon engine forest garden hammer island jacket kettle lantern"


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    agents: Annotated[int, typer.Option(min=1)] = 3,
    turns: Annotated[int, typer.Option(min=1, max=11, help="After the first one.")] = 6,
    first_len: Annotated[int, typer.Option(min=64, help="Tokens of the first prompt.")] = 2000,
    step: Annotated[int, typer.Option(min=64, help="Tokens that a turn brings.")] = 468,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 32,
    gap: Annotated[float, typer.Option(min=0, help="Seconds between two turns.")] = 0,
    pool: Annotated[int, typer.Option(min=1, help="Tokens that the KV cache holds.")] = 6000,
    method: str = "layer-probe",
    budget: Annotated[str, typer.Option(help="Entries per KV head, or a fraction.")] = "512",
    prompt_interval: Annotated[int, typer.Option(min=1)] = 512,
    room: Annotated[bool, typer.Option(help="Measure stock with room for all, too.")] = False,
    dtype: str = dtype_name(fast_dtype()),
) -> None:
    """Lets agents take turns, then asks for every number that they were told."""
    settings = {name: str(value) for name, value in locals().items()}
    from transformers import AutoTokenizer

    given = {"method": method, "budget": parse_number(budget), "prompt_interval": prompt_interval}
    config = EvictionConfig.parse(given)
    model = model or default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    per_agent = first_len + turns * step
    texts, source = plain_prompts(tokenizer, agents + 1, per_agent)
    numbers = random.Random(0)
    told = [
        [(word, numbers.randrange(1_000_000, 10_000_000)) for word in _WORDS.split()[: turns + 1]]
        for _ in range(agents)
    ]
    job: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "kv_bytes": bytes_of_tokens(model, dtype, pool),
        "max_model_len": per_agent + (turns + 2) * (output_len + 40),
        "output_len": output_len,
        "turns": [
            _turns(tokenizer, text, pairs, first_len, step)
            for text, pairs in zip(texts, told, strict=False)
        ],
        "questions": [[_question(tokenizer, word) for word, _ in pairs] for pairs in told],
        "warm_up": texts[-1][:first_len],
        "gap": gap,
        "eviction": None,
    }
    engines = {"plugin": {**job, "eviction": config.model_dump()}, "stock": job}
    if room:
        engines["stock, with room"] = job | {
            "kv_bytes": 2 * agents * per_agent * job["kv_bytes"] // pool
        }
    measured = {name: run_child(__file__, each) for name, each in engines.items()}
    for each in measured.values():
        each["found"] = [
            [
                str(number) in tokenizer.decode(answer)
                for (_, number), answer in zip(*one, strict=True)
            ]
            for one in zip(told, each.pop("answers"), strict=True)
        ]
    _show(measured)
    settings |= {"model": Path(model).name, "text": source}
    print(json.dumps({"settings": settings, "machine": machine(), **measured}))


class _Chat(NamedTuple):
    """What a model's chat template puts around what users say, in tokens.

    Attributes:
        begin: Before the first message.
        after: After a message, before the answer.
        between: After an answer, before the next message.
    """

    begin: list[int]
    after: list[int]
    between: list[int]

    @classmethod
    def of(cls, tokenizer: Any) -> "_Chat":
        marks = "@1@", "@2@", "@3@"
        roles = "user", "assistant", "user"
        said = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        begin, _, between, after = re.split("|".join(marks), text)
        return cls(*(_ids(tokenizer, part) for part in (begin, after, between)))


def _turns(
    tokenizer: Any, text: list[int], told: list[tuple[str, int]], first_len: int, step: int
) -> list[list[int]]:
    """What an agent sends turn by turn: text, with a sentence in it that tells a number."""
    chat, turns, used = _Chat.of(tokenizer), [], 0
    for word, number in told:
        before = chat.between if turns else chat.begin + _ids(tokenizer, _INTRODUCTION)
        sentence = f"\nOne of the special magic numbers for {word} is: {number}.\n"
        ids = _ids(tokenizer, sentence)
        size = (step if turns else first_len) - len(before) - len(ids) - len(chat.after)
        part, used = text[used : used + size], used + size
        half = size // 2
        turns.append([*before, *part[:half], *ids, *part[half:], *chat.after])
    return turns


def _question(tokenizer: Any, word: str) -> list[int]:
    chat = _Chat.of(tokenizer)
    question = f"What is the special magic number for {word} mentioned in the provided text?"
    answer = f"The special magic number for {word} mentioned in the provided text is"
    return [*chat.between, *_ids(tokenizer, question), *chat.after, *_ids(tokenizer, answer)]


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def measure(job: Job) -> dict[str, Any]:
    """The child's part."""
    from vllm import LLM

    llm = LLM(**engine_arguments(job))
    ask(llm, job, [job["warm_up"]])
    empty_prefix_cache(llm)
    histories: list[list[int]] = [[] for _ in job["turns"]]
    rounds, begin = [], time.perf_counter()
    for turn in range(len(job["turns"][0])):
        outputs = []
        for history, own in zip(histories, job["turns"], strict=True):
            time.sleep(job["gap"])
            history += own[turn]
            outputs += ask(llm, job, [history])
            history += outputs[-1].outputs[0].token_ids
        rounds.append(
            {
                "first_token_seconds": [each.metrics.first_token_latency for each in outputs],
                "computed": [
                    len(each.prompt_token_ids) - (each.num_cached_tokens or 0) for each in outputs
                ],
            }
        )
    seconds = time.perf_counter() - begin
    answers = [
        [
            list(ask(llm, job, [history + question])[0].outputs[0].token_ids)
            for question in questions
        ]
        for history, questions in zip(histories, job["questions"], strict=True)
    ]
    return {"seconds": seconds, "rounds": rounds, "answers": answers, **describe(llm)}


def _show(measured: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Agents that grow turn by turn", title_justify="left")
    columns = ("engine", "all turns", "computed after the first", "first token then", "speed")
    for name in (*columns, "numbers answered"):
        table.add_column(name, justify="left" if name == "engine" else "right")
    stock = _later(measured["stock"])["first_token_seconds"]
    for name, each in measured.items():
        later = _later(each)
        found = [answered for one in each["found"] for answered in one]
        table.add_row(
            name,
            f"{each['seconds']:.1f} s",
            f"{sum(later['computed']):,}",
            f"{fmean(later['first_token_seconds']):.3f} s",
            f"{fmean(stock) / fmean(later['first_token_seconds']):.2f}x",
            f"{sum(found)} of {len(found)}",
        )
    table_console().print(table)


def _later(measured: dict[str, Any]) -> dict[str, list[float]]:
    """What was measured of all turns but the first."""
    return {
        name: [number for each in measured["rounds"][1:] for number in each[name]]
        for name in ("first_token_seconds", "computed")
    }


if __name__ == "__main__":
    run_script(main, measure)

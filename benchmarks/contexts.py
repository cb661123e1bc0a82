"""Contexts that many requests share: stock vLLM with its prefix cache, and the plugin, in turn.

Three questions. How many contexts stay resident in the same bytes, when each is asked about in
turn, again and again: what had to give way is prefilled anew. How long the second client waits for
its first token, when the first one has compressed the context. And how many blocks many clients of
one context hold. With `--restart` the plugin also stores its contexts in a folder, and a new engine
finds them there. The last line of the output is one JSON object with every setting and version.
"""

import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from _engine import (
    MIB,
    Job,
    ask,
    default_model,
    describe,
    empty_prefix_cache,
    engine_arguments,
    run_child,
    run_script,
    sampling,
)
from _texts import plain_prompts
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.parsing import parse_number
from vllm_kvselect.offline.tables import console as table_console

if TYPE_CHECKING:
    from vllm import LLM


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    num_contexts: Annotated[int, typer.Option(min=1)] = 24,
    context_len: Annotated[int, typer.Option(min=64, help="Tokens per context.")] = 6000,
    questions: Annotated[int, typer.Option(min=1, help="Rounds over all contexts.")] = 3,
    question_len: Annotated[int, typer.Option(min=1, help="Tokens per question.")] = 40,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 32,
    clients: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 4,
    sharing: Annotated[int, typer.Option(min=1, help="Clients of one context.")] = 16,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache, in MiB.")] = 640,
    method: str = "layer-keydiff",
    budget: Annotated[str, typer.Option(help="Entries per KV head, or a fraction.")] = "0.125",
    dtype: str = dtype_name(fast_dtype()),
    restart: Annotated[bool, typer.Option(help="Measure a context store, too.")] = False,
) -> None:
    """Asks about contexts round robin, then several questions about one."""
    settings = {name: str(value) for name, value in locals().items()}
    from transformers import AutoTokenizer

    given = {"method": method, "budget": parse_number(budget), "context": context_len}
    config = EvictionConfig.parse(given)
    model = model or default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    contexts, source = plain_prompts(tokenizer, num_contexts + 1, context_len)
    asked, _ = plain_prompts(tokenizer, questions * num_contexts, question_len)
    job: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": context_len + question_len + output_len,
        "output_len": output_len,
        "clients": clients,
        "sharing": sharing,
        "contexts": contexts[:-1],
        "warm_up": contexts[-1],
        "questions": asked,
        "eviction": None,
    }
    plugin = config.model_dump()
    with tempfile.TemporaryDirectory() as folder:
        engines = {"stock": None, "plugin": plugin}
        if restart:
            storing = {**plugin, "context_store": folder}
            engines |= {"storing": storing, "restarted": storing}
        measured = {
            name: run_child(__file__, {**job, "eviction": eviction})
            for name, eviction in engines.items()
        }
    _show(measured)
    settings |= {"model": Path(model).name, "text": source}
    print(json.dumps({"settings": settings, "machine": machine(), **measured}))


def measure(job: Job) -> dict[str, Any]:
    """The child's part."""
    from vllm import LLM

    llm = LLM(**engine_arguments(job))
    ask(llm, job, [job["warm_up"]])
    empty_prefix_cache(llm)
    contexts, questions = job["contexts"], job["questions"]
    rounds = [_round(llm, job, first) for first in range(0, len(questions), len(contexts))]
    empty_prefix_cache(llm)
    one, two = (ask(llm, job, [contexts[0] + question])[0] for question in questions[:2])
    asked = [contexts[0] + question for question in questions[: job["sharing"]]]
    alone, together = (_most_blocks(llm, job, prompts) for prompts in (asked[:1], asked))
    return {
        "seconds": sum(each["seconds"] for each in rounds),
        "rounds": rounds,
        "first_client_seconds": one.metrics.first_token_latency,
        "second_client_seconds": two.metrics.first_token_latency,
        "blocks_of_one_client": alone,
        "blocks_of_all_clients": together,
        "answers": [list(output.outputs[0].token_ids) for output in (one, two)],
        **describe(llm),
    }


def _round(llm: "LLM", job: Job, first: int) -> dict[str, Any]:
    """Asks one question about every context, some clients at once."""
    asked = zip(job["contexts"], job["questions"][first:], strict=False)
    prompts = [context + question for context, question in asked]
    outputs, start = [], time.perf_counter()
    for begin in range(0, len(prompts), job["clients"]):
        outputs += ask(llm, job, prompts[begin : begin + job["clients"]])
    cached = [output.num_cached_tokens or 0 for output in outputs]
    return {
        "seconds": time.perf_counter() - start,
        "tokens_prefilled": sum(map(len, prompts)) - sum(cached),
        "contexts_found": sum(count >= len(job["contexts"][0]) // 2 for count in cached),
        "first_token_seconds": fmean(output.metrics.first_token_latency for output in outputs),
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
    }


def _most_blocks(llm: "LLM", job: Job, prompts: list[list[int]]) -> int:
    """Most blocks that some requests at once hold in any step."""
    engine, most = llm.llm_engine, 0.0
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling(job))
    while engine.has_unfinished_requests():
        engine.step()
        used = [m.value for m in llm.get_metrics() if m.name == "vllm:kv_cache_usage_perc"]
        most = max(most, *used)
    return round(most * (llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1))


def _show(measured: dict[str, dict[str, Any]]) -> None:
    table = Table(title="Contexts asked about in turn", title_justify="left")
    table.add_column("engine")
    rounds = ("all rounds", "speed", "first token of the first", "same answers in it")
    names = ("last round", "speed", "contexts found in it")
    clients = ("first client", "second client", "blocks of one client", "of all")
    for name in (*rounds, *names, *clients):
        table.add_column(name, justify="right")
    stock = measured["stock"]
    plugin = measured["plugin"]["rounds"][0]["answers"]
    for name, each in measured.items():
        first, last = each["rounds"][0], each["rounds"][-1]
        same = sum(a == b for a, b in zip(first["answers"], plugin, strict=True))
        table.add_row(
            name,
            f"{each['seconds']:.1f} s",
            f"{stock['seconds'] / each['seconds']:.2f}x",
            f"{first['first_token_seconds']:.3f} s",
            str(same),
            f"{last['seconds']:.1f} s",
            f"{stock['rounds'][-1]['seconds'] / last['seconds']:.2f}x",
            str(last["contexts_found"]),
            f"{each['first_client_seconds']:.2f} s",
            f"{each['second_client_seconds']:.2f} s",
            str(each["blocks_of_one_client"]),
            str(each["blocks_of_all_clients"]),
        )
    table_console().print(table)


if __name__ == "__main__":
    run_script(main, measure)

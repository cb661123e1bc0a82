"""Tokens and log-probabilities of every method, recorded, and compared between two checkouts.

One crowded engine in float32 serves a prompt for every method, contexts, and long answers with
rounds, in chunks and with preemptions. Run this file, by its path, in each checkout, then compare:

    cd OLD && PYTHONPATH=$PWD python NEW/tests/load/recorded.py old.json
    cd NEW && PYTHONPATH=$PWD python tests/load/recorded.py new.json
    python tests/load/recorded.py OLD/old.json new.json

The text is `docs/methods.md` of the checkout this file is in, so both read the same one.
"""

import hashlib
import json
import os
import sys
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

TEXT = Path(__file__).resolve().parents[2] / "docs" / "methods.md"
LARGEST_DIFFERENCE = 1e-4
"""Of a log-probability."""

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,  # prompts come in chunks
    "max_num_seqs": 12,
    "num_gpu_blocks_override": 56,  # too few for so many: the latest are preempted
    "disable_log_stats": False,  # preemptions are counted there
}
EVICTION: dict[str, Any] = {
    "method": "adakv",
    "budget": 96,
    "allow_override": ["method", "budget", "context", "decode_budget", "decode_interval"],
}


class Case(NamedTuple):
    """A request: tokens `[start, start + length)` of the text, and what it asks for."""

    name: str
    start: int
    length: int
    max_tokens: int
    extra_args: dict[str, Any]


def main(
    file: Annotated[Path, typer.Argument(help="JSON file to write; with OTHER, to read.")],
    other: Annotated[Path | None, typer.Argument(help="Compare FILE with this one.")] = None,
    text: Annotated[Path, typer.Option(help="Prompts are cut from it.")] = TEXT,
) -> None:
    """Records what every method answers, or compares two records and fails if they differ."""
    if other is None:
        record = recorded(text.read_text(encoding="utf-8"))
        file.write_text(json.dumps(record), encoding="utf-8")
        answers, preemptions = len(record["answers"]), record["preemptions"]
        print(f"{answers} requests, {preemptions:.0f} preemptions, {record['package']}")
        return
    old, new = (json.loads(path.read_text(encoding="utf-8")) for path in (file, other))
    if old["text"] != new["text"]:
        sys.exit("error: the records are of different texts; record both with the same --text")
    found = differences(old["answers"], new["answers"])
    print("\n".join([*found, f"{len(found)} of {len(old['answers'])} requests differ"]))
    if found:
        sys.exit(1)


def recorded(text: str) -> dict[str, Any]:
    """Serves all cases and returns their tokens and log-probabilities by name.

    Raises:
        SystemExit: If the text is too short, or nothing was preempted.
    """
    # In this process, and with the package that is imported, whichever one is installed.
    os.environ |= {"VLLM_PLUGINS": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm_kvselect.engine.hooks import install

    install()
    from vllm import LLM, SamplingParams

    import vllm_kvselect
    from vllm_kvselect.config import CONFIG_KEY
    from vllm_kvselect.tiny_model import tiny_model

    llm = LLM(str(tiny_model()), **ENGINE, additional_config={CONFIG_KEY: EVICTION})
    tokens, wanted = llm.get_tokenizer().encode(text), cases()
    if len(tokens) < (needed := max(case.start + case.length for case in wanted)):
        sys.exit(
            f"error: the text has {len(tokens)} tokens, {needed} are needed; give a longer one"
        )
    prompts = [
        {"prompt_token_ids": tokens[case.start : case.start + case.length]} for case in wanted
    ]
    sampling = [
        SamplingParams(
            temperature=0,
            max_tokens=case.max_tokens,
            ignore_eos=True,
            logprobs=0,
            extra_args=case.extra_args,
        )
        for case in wanted
    ]
    outputs = [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
    preemptions = sum(
        metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"
    )
    if not preemptions:
        sys.exit("error: nothing was preempted; lower num_gpu_blocks_override")
    return {
        "answers": {
            case.name: [
                list(output.token_ids),
                [next(iter(position.values())).logprob for position in output.logprobs],
            ]
            for case, output in zip(wanted, outputs, strict=True)
        },
        "preemptions": preemptions,
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "package": vllm_kvselect.__file__,
    }


def cases() -> list[Case]:
    """A prompt of every method, a long answer of those that work in rounds, and some contexts."""
    from vllm_kvselect.registry import METHODS

    found = []
    for index, (name, method) in enumerate(METHODS.items()):
        asked = {"kv_eviction": name}
        found.append(Case(f"{name}, prompt", 40 * index, 250 + 7 * index, 24, asked))
        if index % 3 == 0:
            context = asked | {"kv_eviction_context": 256, "kv_eviction_budget": 80}
            found.append(Case(f"{name}, context", 0, 330 + index, 16, context))
        if not method.not_in_rounds:
            rounds = asked | {"kv_eviction_decode_budget": 96, "kv_eviction_decode_interval": 40}
            found.append(Case(f"{name}, rounds", 30 * index, 60 + 3 * index, 150, rounds))
    return found


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two records' answers, a line for each request."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        if name not in old or name not in new:
            found.append(f"{name}: only in the {'new' if name in new else 'old'} record")
            continue
        (old_tokens, old_logprobs), (new_tokens, new_logprobs) = old[name], new[name]
        if old_tokens != new_tokens:
            pairs = zip(old_tokens, new_tokens, strict=False)
            same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            found.append(f"{name}: other tokens after the first {same}")
            continue
        largest = max(abs(a - b) for a, b in zip(old_logprobs, new_logprobs, strict=True))
        if not largest <= LARGEST_DIFFERENCE:
            found.append(f"{name}: a log-probability differs by {largest:.2g}")
    return found


if __name__ == "__main__":
    typer.run(main)

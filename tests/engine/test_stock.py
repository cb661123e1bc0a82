"""Stock stays stock: an engine whose process never loads the plugin gives the same answers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.marks import starts_engine
from vllm_kvselect.machine import dtype_name, fast_dtype

GENERATE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
job = json.load(sys.stdin)
params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=2)
prompts = [{"prompt_token_ids": p} for p in job["prompts"]]
found = []
for additional_config in job["configs"]:
    llm = LLM(**job["engine"], additional_config=additional_config)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    found.append([
        [sorted((t, e.logprob) for t, e in position.items()) for position in o.outputs[0].logprobs]
        for o in outputs
    ])
    llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
print(json.dumps([found, "vllm_kvselect.engine.hooks" in sys.modules]))
"""


@starts_engine
def generate(
    model: Path, prompts: list[list[int]], plugins: str | None, *configs: dict[str, Any]
) -> Any:
    """Answers of a fresh process's engines, and whether the hooks were loaded there."""
    engine: dict[str, Any] = {"model": str(model), "max_model_len": 1024, "enforce_eager": True}
    engine |= {"dtype": dtype_name(fast_dtype()), "kv_cache_memory_bytes": 2**26, "block_size": 32}
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    if plugins is not None:
        environment["VLLM_PLUGINS"] = plugins
    job = json.dumps({"engine": engine, "prompts": prompts, "configs": configs})
    command = [sys.executable, "-c", GENERATE]
    result = subprocess.run(
        command, input=job, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_plugin_without_the_flag_changes_no_answer(shallow_model: Path, make_prompts: Any) -> None:
    prompts = make_prompts([1 + 37 * i % 500 for i in range(20)])
    (stock,), is_hooked = generate(shallow_model, prompts, "", {})
    assert not is_hooked
    above = {"kv_eviction": {"method": "adakv-perturb", "budget": 600}}
    answers, is_hooked = generate(shallow_model, prompts, None, {}, above)
    assert is_hooked
    assert answers == [stock, stock]

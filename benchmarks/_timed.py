"""An engine of any checkout, which answers turns with what as many prompts as it is told took.

A child of `against.py`. It imports nothing of ours: what vLLM loads as the plugin is what
`PYTHONPATH` names.
"""

import json
import os
import random
import sys
import time


def main() -> None:
    from vllm import LLM, SamplingParams

    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as reply:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        job = json.loads(sys.stdin.readline())
        llm = LLM(**job["engine"])
        engine = llm.llm_engine
        for turn, _ in enumerate(sys.stdin):
            draw = random.Random(turn)  # both engines get the same
            # The first turn warms up.
            num_prompts, output_len = (job["num_prompts"], job["output_len"]) if turn else (1, 3)
            told = SamplingParams(max_tokens=output_len, ignore_eos=True, temperature=0)
            for index in range(num_prompts):
                ids = [draw.randrange(1000, 40_000) for _ in range(job["prompt_len"])]
                engine.add_request(f"{turn}-{index}", {"prompt_token_ids": ids}, told)
            begin, times = time.perf_counter(), {}
            while engine.has_unfinished_requests():
                outputs = engine.step()
                now = time.perf_counter() - begin
                longest = max((len(each.outputs[0].token_ids) for each in outputs), default=0)
                if longest >= 1:
                    times.setdefault("first token", now)
                if longest >= 2:
                    times.setdefault("second token", now)
            times["all"] = time.perf_counter() - begin
            stats = llm.collective_rpc("kv_eviction_stats")[0]
            llm.collective_rpc("reset_kv_eviction_stats")
            times["selection"] = stats["selection_seconds"]
            llm.reset_prefix_cache()
            print(json.dumps(times), file=reply, flush=True)


if __name__ == "__main__":
    main()

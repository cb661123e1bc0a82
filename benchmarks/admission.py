"""Scheduler steps by block arithmetic, without a model: what another order of admission may gain.

A step of `n` requests takes `--step-ms` and `--request-ms` for each, a prompt its prefill. As in
vLLM those that decode come first, and the youngest is preempted when blocks run out. The last line
of the output is one JSON object.
"""

import json
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated

import typer
from _engine import BenchmarkError, run_script, table_console
from rich.table import Table

from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.retention import cuts

BLOCK_SIZE = 32
BATCHED_TOKENS = 4096
"""Tokens of a step at most, vLLM's default offline on CPU."""


@dataclass
class Request:
    """A request.

    Attributes:
        answered: Tokens of its answer.
        blocks: Blocks that it holds.
        is_new: Whether it was prefilled in the last step.
    """

    answered: int = 0
    blocks: int = 0
    is_new: bool = False


@dataclass(frozen=True)
class Rule:
    """How prompts are admitted.

    Attributes:
        name: What it is called.
        watermark: Blocks that stay free when a prompt is admitted.
        foresight: Whether answers' lengths are known, and nobody is admitted who leads to a
            preemption.
        packed_at_once: Whether a prompt never holds more than what is retained of it.
    """

    name: str
    watermark: int = 0
    foresight: bool = False
    packed_at_once: bool = False


@dataclass
class Simulation:
    """Requests that all wait at the beginning.

    Attributes:
        rule: How they are admitted.
        prompt_len: Tokens of every prompt.
        output_len: Tokens of every answer.
        freed: Blocks that a prompt gives back.
        free: Blocks that nobody holds.
        waiting: Requests not admitted, or preempted.
        running: Requests admitted, the youngest last.
        num_preempted: Preemptions so far.
        num_prefilled: Tokens prefilled so far, again after a preemption.
    """

    rule: Rule
    prompt_len: int
    output_len: int
    freed: int
    free: int
    waiting: list[Request]
    running: list[Request] = field(default_factory=list)
    num_preempted: int = 0
    num_prefilled: int = 0

    def run(self) -> list[int]:
        """Lets all requests end; returns how many decode in every step."""
        decoding = []
        while self.waiting or self.running:
            any_preempted = self._grow()
            decoding.append(len(self.running))
            if not any_preempted:
                self._admit(BATCHED_TOKENS - len(self.running))
            for request in self.running:
                request.answered += 1
            for request in [r for r in self.running if r.answered == self.output_len]:
                self.running.remove(request)
                self.free += request.blocks
        return decoding

    def _blocks(self, answered: int) -> int:
        return ceil((self.prompt_len + answered) / BLOCK_SIZE)

    def _grow(self) -> bool:
        """Gives decoding requests their next block; says whether somebody lost theirs for it."""
        before = self.num_preempted
        for request in self.running:
            if request.is_new and not self.rule.packed_at_once:
                request.blocks -= self.freed
                self.free += self.freed
            request.is_new = False
        index = 0
        while index < len(self.running):
            request = self.running[index]
            more = self._blocks(request.answered + 1) - self.freed - request.blocks
            while more > self.free and index < len(self.running):
                preempted = self.running.pop()
                self.free += preempted.blocks
                self.waiting.insert(0, preempted)
                self.num_preempted += 1
            if index < len(self.running):
                self.free -= more
                request.blocks += more
            index += 1
        return self.num_preempted > before

    def _admit(self, num_tokens: int) -> None:
        while self.waiting:
            request = self.waiting[0]
            length = self.prompt_len + request.answered
            held = self._blocks(request.answered)
            if self.rule.packed_at_once:
                held -= self.freed
            if length > num_tokens or held + self.rule.watermark > self.free:
                return
            if self.rule.foresight and not self._all_fit([*self.running, request]):
                return
            self.running.append(self.waiting.pop(0))
            request.blocks, request.is_new = held, True
            self.free -= held
            num_tokens -= length
            self.num_prefilled += length

    def _all_fit(self, requests: list[Request]) -> bool:
        """Whether these requests can all end: it is tightest just before one of them does."""
        total = self.free + sum(request.blocks for request in self.running)
        ends = {self.output_len - request.answered for request in requests}
        return all(
            sum(
                self._blocks(request.answered + end) - self.freed
                for request in requests
                if self.output_len - request.answered >= end
            )
            <= total
            for end in ends
        )


def main(
    num_prompts: Annotated[int, typer.Option(min=1)] = 24,
    prompt_len: Annotated[int, typer.Option(min=1)] = 1500,
    output_len: Annotated[int, typer.Option(min=1)] = 400,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of 32 tokens.")] = 135,
    budget: Annotated[int, typer.Option(min=1, help="Entries per KV head.")] = 256,
    step_ms: Annotated[float, typer.Option(help="A decode step without requests.")] = 45.0,
    request_ms: Annotated[float, typer.Option(help="What a request adds to it.")] = 1.67,
    prefill_ms: Annotated[float, typer.Option(help="A prompt token.")] = 0.62,
) -> None:
    """Prints steps, preemptions and seconds of every rule of admission."""
    settings = dict(locals())
    planned = cuts(prompt_len, BLOCK_SIZE, EvictionConfig(budget=budget))
    num_freed = planned.num_freed(prompt_len)
    if not num_freed:
        raise BenchmarkError(f"nothing is dropped of {prompt_len} tokens with budget {budget}")
    if ceil((prompt_len + output_len) / BLOCK_SIZE) > blocks:
        raise BenchmarkError("one request alone does not fit into the blocks; give --blocks more")
    rules = [
        Rule("vLLM's"),
        *(Rule(f"watermark of {n} blocks", n) for n in (8, 16, 24, 32)),
        Rule("no preemption", foresight=True),
        Rule("packed at once", packed_at_once=True),
        Rule("packed at once, 16 free", 16, packed_at_once=True),
        Rule("packed at once, no preemption", foresight=True, packed_at_once=True),
    ]
    table = Table("admission", "steps", "requests per step", "preempted", "prefilled", "seconds")
    results = []
    for rule in rules:
        waiting = [Request() for _ in range(num_prompts)]
        simulation = Simulation(rule, prompt_len, output_len, num_freed, blocks, waiting)
        decoding = simulation.run()
        mean = round(sum(decoding) / len(decoding), 2)
        decoded = sum(step_ms + request_ms * n for n in decoding if n)
        prefilled = simulation.num_prefilled
        seconds = round((decoded + prefill_ms * prefilled) / 1e3, 1)
        row = (rule.name, len(decoding), mean, simulation.num_preempted, prefilled, seconds)
        results.append(row)
        table.add_row(*map(str, results[-1]))
    table_console().print(table)
    print(json.dumps({"rules": results, "settings": settings}))


if __name__ == "__main__":
    run_script(main)

"""What is proved and measured on a GPU, without network, in two halves of six minutes on an H100.

Engines of a group of steps start side by side, once for all of their steps. What is only proved
may run while others start. Before anything is timed all are ready, and whoever is not in time is
ended; then they are asked one after the other, so nothing runs beside what is timed. A proof that
something is wrong ends the run; one for which no engine got ready does not. What there is no time
for is named. Each step can be run alone (`--only`). What comes out is a JSON line at once, and a
Markdown table at the end.

`--dry-run` walks every step on the processor: the same code, on small models and short prompts,
with a stand-in for the attention backends' calls. It proves that the kit runs, and nothing else.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _children import Child, Row
from _device import HAS_CARD
from _engine import BenchmarkError, Job
from _models import MODELS, config_of, write
from cut import CASES, CUTS
from engines import KEPT

HERE = Path(__file__).parent
Found = dict[str, list[Row]]
"""What a step's engines have answered, by their names."""
Asks = list[tuple[str, Row]]
"""Engines and what they are asked, in this order."""


def engine(
    kind: str = "8b",
    gib: int = 8,
    longest: int = 65000,
    eviction: Row | None = None,
    script: str = "engines",
    **arguments: Any,
) -> Job:
    """What a child makes ready.

    Args:
        kind: A key of `MODELS`, or what `proofs.py` proves.
        gib: The pool: so many tokens as that holds of an 8B in bfloat16, whatever the model.
        longest: Tokens of a prompt and its answer at most.
        eviction: None is stock.
        script: Whose child it is.
        arguments: Further ones of vLLM.
    """
    return locals()


MAY_CHOOSE = ["budget", "context", "prompt_interval", "prefill"]
EIGHTH = {"method": "layer-probe", "budget": 0.125, "allow_override": MAY_CHOOSE}
PERTURB = {**EIGHTH, "method": "adakv-perturb"}
KEYDIFF = {"method": "layer-keydiff", "budget": 0.125, "allow_override": ["budget"]}
LOUD = partial(engine, "loud", 4, 8192)
GIVEN = {"logits_processors": ["vllm_kvselect.engine.given_answers:GivenAnswers"]}
BY_TRITON = {**GIVEN, "attention_backend": "TRITON_ATTN", "enforce_eager": True}
DRAFTED = {"method": "draft_model", "num_speculative_tokens": 3}
FP8 = partial(engine, longest=130560, kv_cache_dtype="fp8")
ENGINES = {
    "view": engine("view", script="proofs"),
    "served": engine("served", script="proofs", eviction={}),
    "cut": engine(script="cut", eviction={}),
    "loud stock": LOUD(**GIVEN),
    "loud 1/8": LOUD(eviction=EIGHTH, **GIVEN),
    "loud 1/8 by Triton": LOUD(eviction=EIGHTH, **BY_TRITON),
    "loud 1/8 drafted": LOUD(eviction=EIGHTH, speculative_config=DRAFTED),
    "stock": engine(),
    "stock fp8": FP8(),
    "1/8": engine(eviction=EIGHTH),
    "1/8 fp8": FP8(eviction=EIGHTH),
    "1/8 adakv-perturb": engine(eviction=PERTURB),
    "stock long": engine("8b", 16, 130560),
    "1/8 long": engine("8b", 16, 130560, EIGHTH),
    "room": engine("8b", 26, 130560),
    "hybrid stock": engine("hybrid", 16, 16384),
    "hybrid 1/8 layer-keydiff": engine("hybrid", 16, 16384, KEYDIFF),
    "experts stock": engine("experts", 16, 16384),
    "experts 1/8": engine("experts", 16, 16384, EIGHTH),
}
"""With `room` stock has room for everything; `long` ones hold a prompt of 130,000 tokens."""


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        group: Whose engines stand together; the first two make the first half.
        seconds: What it takes on an H100, about, once its engines are ready.
        asks: Whom it asks what.
        check: Raises a `BenchmarkError` if what was found proves that something is wrong.
        proves: Whether nothing is measured after it fails; its engines end with it.
    """

    group: int
    seconds: float
    asks: Asks
    check: Callable[[Found], str] = lambda found: ""
    proves: bool = False


def each(engines: str, *commands: Row) -> Asks:
    """The same commands for several engines, one command after the other."""
    return [(engine, command) for command in commands for engine in engines.split(", ")]


def run(n: int, length: int, out: int, extra: Row | None = None, repeats: int = 1) -> Row:
    """A workload of equal prompts."""
    return {"do": "generate", **locals()}


def away(first: Row, second: Row) -> float:
    """How far the likelihoods of the same tokens are from each other: nats a token."""
    pairs = zip(first["nats"], second["nats"], strict=True)
    return statistics.fmean(abs(one - other) for one, other in pairs)


def kept_is_stock(found: Found) -> str:
    """What keeps everything is as near to stock as stock to itself, and what does not is not."""
    (stock, alone), (kept, eighth) = found["loud stock"], found["loud 1/8"]
    rounding, ours, dropped = (away(stock, other) for other in (alone, kept, eighth))
    said = f"nats a token from stock: alone {rounding:.5f}, all kept {ours:.5f}, 1/8 {dropped:.5f}"
    if ours > 2 * rounding + 1e-4 or dropped < 10 * ours:
        raise BenchmarkError(said)
    return said


def backends_agree(found: Found) -> str:
    """An eighth by one backend in graphs is an eighth by another without."""
    (kept, eighth), (other_kept, other) = found.values()
    effect, rounding, between = away(kept, eighth), away(kept, other_kept), away(eighth, other)
    said = f"nats a token: between backends {between:.5f}, all kept {rounding:.5f}, "
    said += f"between 1/8 and all kept {effect:.5f}"
    if between > effect / 4:
        raise BenchmarkError(said)
    return said


def drafts_change_nothing(found: Found) -> str:
    """The same tokens with drafts and without; on a card a rounding may turn one and the rest."""
    pairs = zip(*(rows[0]["tokens"] for rows in found.values()), strict=True)
    same = [a == b for pair in pairs for a, b in zip(*pair, strict=True)]
    said = f"{sum(same)} of {len(same)} tokens the same with drafts"
    if statistics.fmean(same) < (0.5 if HAS_CARD else 1.0):
        raise BenchmarkError(said)
    return said


def memory_was_reserved(found: Found) -> str:
    """What cuts take beside what stock takes is reserved."""
    most = max(row["peak_gib"] for row in found["1/8 long"]) - found["stock long"][0]["peak_gib"]
    reserved = found["1/8 long"][0]["reserved_gib"]
    said = f"{most:.2f} GiB beside stock's, {reserved:.2f} reserved"
    if most > reserved:
        raise BenchmarkError(said)
    return said


HALF, WAIT, SLOWNESS = (360, 170, 5) if HAS_CARD else (1800, 900, 100)
"""Seconds of a half, until an engine is ready, and by what a step may exceed what it takes."""
READ, ALONE, KEPT_READ = ({"do": "read", **more} for more in ({}, {"alone": True}, {"extra": KEPT}))
DRAFT = {"do": "draft"}
TIMED = [{"method": method, "case": case} for case in range(len(CASES)) for method in CUTS]
CUT_4096 = {"kv_eviction_prompt_interval": 4096, "kv_eviction_budget": 4096}
SPARSE = {"kv_prefill": "critiprefill"}
LENGTHS, LONGEST = (1000, 16384, 32768, 64000), 130000
MANY, ANSWERS, SHAPE = run(12, 16384, 1024), run(8, 20480, 2048), run(8, 8192, 128)
DOCUMENTS = {"do": "documents", "n": 16, "length": 16384, "rounds": 2}
AGENTS = {"do": "sessions", "n": 6, "length": 8192, "turn": 2048, "turns": 4, "out": 64}
ATTENTION = ["--batches", "16,64", "--retained", "2033"] if HAS_CARD else ["--dry-run"]
FIRST = each("stock long, 1/8 long", run(1, 16384, 2, repeats=5))
SHORT = each("stock long, 1/8 long", run(64, 1000, 2, repeats=3))
ONE = each("1/8 long", run(1, LONGEST, 65, CUT_4096))
ONE += each("stock long, 1/8 long", run(1, LONGEST, 65))
BY_LENGTH = each("stock long, 1/8 long", *(run(1, length, 65) for length in LENGTHS))
BY_LENGTH += each("1/8 long", *(run(1, length, 65, CUT_4096) for length in LENGTHS[2:]))
BY_LENGTH_FP8 = each("stock fp8, 1/8 fp8", *(run(1, n, 65) for n in (1000, 32768, LONGEST)))
SPARSELY = each("1/8 long", *(run(1, n, 2, SPARSE) for n in (*LENGTHS[2:], LONGEST)))
KEPT_ALL = each("stock, 1/8", run(12, 2048, 256)) + each("1/8", run(12, 2048, 256, KEPT))
DENSE = each("1/8 adakv-perturb", run(1, 16384, 2, repeats=3), MANY)
READS = each("loud stock", READ, ALONE) + each("loud 1/8", KEPT_READ, READ)
TWICE = each("loud 1/8, loud 1/8 by Triton", KEPT_READ, READ)
STARTS = (115, 65, 115, 65)
"""Seconds until the engines of a group are ready on an H100: the first of a half compile."""
STEPS = {
    "view": Step(1, 1, each("view", {}), proves=True),
    "tokens": Step(1, 4, READS, kept_is_stock, proves=True),
    "cut": Step(1, 20, each("cut", *TIMED)),
    "first token": Step(1, 5, FIRST),
    "short prompts": Step(1, 10, SHORT),
    "130,000": Step(1, 27, ONE, memory_was_reserved),
    "alone": Step(1, 18, BY_LENGTH),
    "sparse": Step(1, 11, SPARSELY),
    "16K -> 1K": Step(2, 56, each("1/8, stock", MANY)),
    "nothing dropped": Step(2, 8, KEPT_ALL),
    "perturb": Step(2, 17, DENSE),
    "served": Step(3, 20, each("served", {}), proves=True),
    "backends": Step(3, 4, TWICE, backends_agree, proves=True),
    "16K -> 1K, fp8": Step(3, 39, each("1/8 fp8, stock fp8", MANY)),
    "alone, fp8": Step(3, 25, BY_LENGTH_FP8),
    "drafter": Step(3, 2, each("loud 1/8, loud 1/8 drafted", DRAFT), drafts_change_nothing),
    "hybrid": Step(3, 4, each("hybrid stock, hybrid 1/8 layer-keydiff", SHAPE)),
    "experts": Step(3, 4, each("experts stock, experts 1/8", SHAPE)),
    "16K -> 1K, room": Step(4, 22, each("room", MANY)),
    "documents": Step(4, 26, each("1/8, room", DOCUMENTS)),
    "sessions": Step(4, 12, each("1/8, room", AGENTS)),
    "attention": Step(4, 15, each("attention", {"arguments": ATTENTION})),
    "20K -> 2K": Step(4, 55, each("1/8, room", ANSWERS)),
}
"""In their order, the most wanted first. For the last of a half there may be no time left."""


class Kit:
    """Runs steps.

    Args:
        steps: Some of `STEPS`.
        seconds: After which it stops.
        output: Where its lines of JSON go.
        folder: Where models are made.
    """

    def __init__(self, steps: dict[str, Step], seconds: float, output: Path, folder: Path) -> None:
        self._steps, self._output, self._folder = steps, output, folder
        self._start, self._seconds = time.monotonic(), seconds
        self._children: dict[str, Child] = {}
        self._ready: set[str] = set()
        self._patience = 0.0
        self.lines, self.failed = list[str](), list[str]()

    def run(self) -> None:
        """Runs all steps, as far as time and proofs allow."""
        try:
            for group in sorted({step.group for step in self._steps.values()}):
                steps = {n: step for n, step in self._steps.items() if step.group == group}
                self._stand(engines_of(steps))
                while steps:
                    name = next(iter(steps))
                    if self._step(name, step := steps.pop(name)):
                        return
                    if step.proves:
                        self._end({*engines_of({name: step})} - {*engines_of(steps)})
        finally:
            self._end({*self._children})

    def _stand(self, engines: list[str]) -> None:
        """Lets some engines stand and no others."""
        self._end(self._children.keys() - engines)
        for name in engines:
            if name not in self._children and name in ENGINES:
                self._children[name] = child(ENGINES[name], self._folder)
        self._patience = time.monotonic() + min(WAIT, self._left())

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self._children:
                self._children.pop(name).end()
                self._ready.discard(name)

    def _wait(self, name: str) -> None:
        """Waits for an engine to be ready; if it is not in time, it is ended."""
        if name in self._children and name not in self._ready:
            seconds = max(1.0, self._patience - time.monotonic())
            if self._answered("start", name, "answer", seconds):
                self._ready.add(name)

    def _step(self, name: str, step: Step) -> bool:
        """Runs a step; whether it proves that something is wrong."""
        for engine in [*self._children]:
            if not step.proves or engine in engines_of({name: step}):
                self._wait(engine)
        found: Found = {}
        seconds, wrong = step.seconds / len(step.asks), False
        for engine, command in step.asks:
            left, limit = self._left(), SLOWNESS * seconds + 30
            if left < seconds:
                self._fail(name, engine, f"not run, {left:.0f} s were left")
            elif engine not in ENGINES:
                self._script(name, engine, command["arguments"], min(limit, left))
            elif engine in self._ready:
                row = self._answered(name, engine, "ask", command, min(limit, left))
                found.setdefault(engine, []).extend([row] if row else [])
                wrong |= row is None
        if sum(map(len, found.values())) == len(step.asks):
            try:
                said = step.check(found)
            except BenchmarkError as error:
                self._fail(name, "all", f"check failed: {error}")
                wrong = True
            else:
                if said:
                    self._say(name, "all", {"what": "check", "result": said})
        return wrong and step.proves

    def _answered(self, step: str, engine: str, how: str, *given: Any) -> Row | None:
        """An engine's answer; without one it is ended."""
        try:
            row: Row = getattr(self._children[engine], how)(*given)
        except BenchmarkError as error:
            self._end([engine])
            self._fail(step, engine, f"failed: {error}")
            return None
        self._say(step, engine, row)
        return row

    def _script(self, step: str, name: str, arguments: list[str], limit: float) -> None:
        """Runs a script that prints rows."""
        command = [sys.executable, str(HERE / f"{name}.py"), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired:
            return self._fail(step, name, f"ended: it took more than {limit:.0f} s")
        for line in done.stdout.splitlines():
            if line.startswith('{"what"'):
                self._say(step, name, json.loads(line))
        if done.returncode:
            self._fail(step, name, f"failed: {done.stderr.strip()[-300:]}")
        return None

    def _left(self) -> float:
        return self._start + self._seconds - time.monotonic()

    def _fail(self, step: str, engine: str, why: str) -> None:
        self.failed.append(f"{step}, {engine}")
        self._say(step, engine, {"what": "FAILED", "result": why})

    def _say(self, step: str, engine: str, row: Row) -> None:
        """Prints a line at once; likelihoods and tokens are for checks."""
        at = round(time.monotonic() - self._start, 1)
        line = {"at": at, "step": step, "engine": engine, **row}
        line = {key: it for key, it in line.items() if key not in ("nats", "tokens")}
        print(json.dumps(line), flush=True)
        with self._output.open("a") as file:
            print(json.dumps(line), file=file)
        result = " ".join(row["result"].split()).replace("|", "/")[:500]
        self.lines.append(f"| {step} | {engine} | {row['what']} | {result} |")


def engines_of(steps: dict[str, Step]) -> list[str]:
    """Those that steps ask, in order."""
    return [*dict.fromkeys(engine for step in steps.values() for engine, _ in step.asks)]


def child(job: Job, folder: Path) -> Child:
    """Starts an engine, whose model is made if there is none yet."""
    kind, eviction, arguments = job["kind"], job["eviction"], dict(job["arguments"])
    model = str(folder / kind)
    if kind in MODELS and not Path(model).exists():
        write(model, config_of(kind), loud=kind == "loud")
    if eviction and "probe" in eviction["method"]:
        eviction = {**eviction, "probe": f"{model}.probe"}
    if speculative := arguments.get("speculative_config"):  # the model itself drafts
        arguments["speculative_config"] = {**speculative, "model": model}
    job = {**job, "model": model, "eviction": eviction, "arguments": arguments}
    return Child(str(HERE / f"{job['script']}.py"), job, small=not HAS_CARD)


def heading(dry_run: bool) -> list[str]:
    """What it ran on, and the head of the table."""
    card = "a processor"
    if HAS_CARD:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        card = f"{torch.cuda.get_device_name()}, driver {driver[0] if driver else 'unknown'}"
    if dry_run:
        card += ", DRY RUN: nothing below is a measurement"
    versions = f"vLLM {version('vllm')}, torch {torch.__version__}, triton {version('triton')}"
    return [f"{card}; {versions}.", "", "| step | engine | what | result |", "| --- " * 4 + "|"]


def main(
    only: Annotated[list[str] | None, typer.Option(help="Steps to run; all if left out.")] = None,
    half: Annotated[int | None, typer.Option(min=1, max=2, help="Of the steps.")] = None,
    seconds: Annotated[float | None, typer.Option(help="After which it stops.")] = None,
    output: Annotated[Path, typer.Option(help="Table; lines of JSON go beside.")] = Path("gpu.md"),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="On the processor, small.")] = False,
) -> None:
    """Runs steps and writes one Markdown table."""
    if unknown := {*(only or ())} - STEPS.keys():
        sys.exit(f"error: unknown steps {sorted(unknown)}; there are {', '.join(STEPS)}")
    if dry_run == HAS_CARD:
        sys.exit(
            "error: there is a GPU; leave --dry-run out"
            if HAS_CARD
            else "error: there is no GPU; nothing was proved or measured (--dry-run needs none)"
        )
    steps = {
        name: step
        for name, step in STEPS.items()
        if (not only or name in only) and half in (None, (step.group + 1) // 2)
    }
    halves = {(step.group + 1) // 2 for step in steps.values()}
    seconds = seconds or HALF * len(halves)
    with tempfile.TemporaryDirectory() as folder:
        kit = Kit(steps, seconds, output.with_suffix(".jsonl"), Path(folder))
        try:
            kit.run()
        finally:
            output.write_text("\n".join([*heading(dry_run), *kit.lines]) + "\n")
            print(output.read_text())
    if kit.failed:
        sys.exit(f"error: {'; '.join(kit.failed)}")


if __name__ == "__main__":
    typer.run(main)

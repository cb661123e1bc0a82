"""The package's command `vllm-kvselect`: the small model, methods, plans, contexts, a doctor."""

from contextlib import suppress
from functools import partial
from math import ceil
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from vllm_kvselect import __version__
from vllm_kvselect.calibration.command import calibrate
from vllm_kvselect.config import SETTINGS, ConfigError, EvictionConfig
from vllm_kvselect.doctor import doctor
from vllm_kvselect.evaluation.command import evaluate
from vllm_kvselect.offline.errors import EvaluationError
from vllm_kvselect.offline.parsing import parse_number
from vllm_kvselect.planning.cuts import budget_problem, cuts, whole_interval
from vllm_kvselect.registry import AUTO, AUTO_INTERVAL, METHODS, PREFERRED
from vllm_kvselect.scorers import SERVED
from vllm_kvselect.store.command import contexts
from vllm_kvselect.tiny_model import TinyModelError, tiny_model
from vllm_kvselect.top import Snapshot, TopError, render, watch

_LARGEST = 2**31 - 1
"""Of a number on a command line: what counts with more of them would never end."""


_UsageError: Any = typer.BadParameter.__bases__[0]
"""What the parser refuses; typer itself has a name for a part of it only."""


class _Command(TyperCommand):
    """Refuses numbers that no option means, whatever the option is."""

    def invoke(self, ctx: Any) -> Any:
        for name, value in ctx.params.items():
            # Written so that NaN is refused, too.
            if isinstance(value, int | float) and not abs(value) <= _LARGEST:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {value} is not accepted; numbers go up to "
                    f"{_LARGEST}"
                )
        return super().invoke(ctx)


class _Group(TyperGroup):
    """Shows the errors that tell the user what to do as one line, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ConfigError, EvaluationError, TinyModelError, TopError) as error:
            reason = str(error)
        except OSError as error:  # of a file or a folder that the user named
            place = "" if error.filename is None else f"{error.filename}: "
            reason = f"{place}{error.strerror or error}; name another file or folder"
        except _UsageError as error:
            path = (error.ctx or ctx).command_path
            reason = f"{error.format_message().rstrip('.')}; see {path} --help"
        typer.echo(f"error: {' '.join(reason.split())}", err=True)
        raise typer.Exit(2)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    help="KV cache eviction per attention head for vLLM.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


_command = partial(app.command, cls=_Command)
_command("evaluate")(evaluate)
_command("calibrate")(calibrate)
_command("doctor")(doctor)
_command("contexts")(contexts)


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Holds the options of the command as a whole."""


@_command("tiny-model")
def tiny_model_command() -> None:
    """Print the folder of SmolLM2-135M-Instruct, made on first use."""
    typer.echo(tiny_model())


@_command("fast-dtype")
def fast_dtype_command() -> None:
    """Print the data type that this machine's processor multiplies fast, for --dtype."""
    # Here, because it needs torch.
    from vllm_kvselect.machine import dtype_name, fast_dtype

    typer.echo(dtype_name(fast_dtype()))


@_command("methods")
def methods_command() -> None:
    """List the methods: what each retains, its cost, its limits, its paper."""
    console = Console()
    for group, names in SERVED.items():
        console.rule(group, align="left")
        for name in names:
            method = METHODS[name]
            facts = Table.grid(padding=(0, 2, 0, 0))
            facts.add_column(min_width=len("  cost per layer"))
            facts.add_row("  retains", method.summary)
            facts.add_row("  cost per layer", method.cost)
            facts.add_row("  limits", method.limits)
            facts.add_row("  published in", method.paper)
            console.print(f"[bold]{name}")
            console.print(facts, "")


@_command("top")
def top_command(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://localhost:8000",
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between frames.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and stop.")] = False,
) -> None:
    """Watch a running server: blocks used and saved, requests running and waiting."""
    console = Console()
    if once:
        console.print(render(Snapshot.fetch(url), url))
        return
    with suppress(KeyboardInterrupt):
        watch(url, interval, console)


@_command("plan")
def plan_command(
    prompt_len: Annotated[int, typer.Option(min=1, help="Length of the prompt in tokens.")],
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 32,
    page_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Entries per page, of which a block has one or several; 32 on CPU.",
            show_default="the block size",
        ),
    ] = None,
    budget: Annotated[str | None, typer.Option(help=SETTINGS["budget"].help)] = None,
    window: Annotated[int | None, typer.Option(help=SETTINGS["window"].help)] = None,
    method: Annotated[str, typer.Option(help=SETTINGS["method"].help)] = AUTO,
    prompt_interval: Annotated[
        int | None, typer.Option(help=SETTINGS["prompt_interval"].help)
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="The server's longest prompt, of which a budget must be enough.",
            show_default="the prompt's length",
        ),
    ] = None,
) -> None:
    """Show what is retained of a prompt and how many blocks that frees.

    What a server would refuse is refused here too. `auto` is what it is where there is a probe.
    """
    number = None if budget is None else parse_number(budget)
    given = {"budget": number, "window": window, "prompt_interval": prompt_interval}
    values: dict[str, Any] = {key: val for key, val in given.items() if val is not None}
    if method == AUTO:
        values = {"prompt_interval": AUTO_INTERVAL, **values, "method": PREFERRED[0]}
    config = EvictionConfig.parse({"method": method, **values})
    page_size = page_size or block_size
    if block_size % page_size:
        raise ConfigError(f"a block of {block_size} tokens is no multiple of a page of {page_size}")
    longest = max_model_len or prompt_len
    if config.enabled and (problem := budget_problem(longest, page_size, config)) is not None:
        if isinstance(config.budget, float):
            problem += "; if the server takes longer prompts, say so with --max-model-len"
        raise ConfigError(problem)
    planned = cuts(prompt_len, block_size, config, page_size=page_size)
    num_blocks, num_dropped, freed, first_of_tail = ceil(prompt_len / block_size), 0, 0, 0
    if (cut := planned.last_made(prompt_len)) is not None:
        num_dropped, freed = cut.num_dropped * page_size, cut.num_freed
        first_of_tail = min(cut.first_of_tail, num_blocks)
    table = Table(show_header=False, box=None)
    table.add_row("method", config.method)
    if interval := whole_interval(config, block_size):
        table.add_row("cut while computed", f"every {interval} tokens")
    table.add_row("entries retained", f"{prompt_len - num_dropped} of {prompt_len} per KV head")
    table.add_row("blocks packed", str(first_of_tail - freed))
    table.add_row("blocks of the tail", str(num_blocks - first_of_tail))
    table.add_row("blocks freed", f"{freed} of {num_blocks}")
    table.add_row("most blocks held", str(planned.most_held(prompt_len, block_size)))
    console = Console()
    console.print(table)
    if not freed:
        console.print("Nothing is freed: the request runs as in stock vLLM.")

import pytest
from typer.testing import CliRunner, Result

from vllm_kvselect import __version__
from vllm_kvselect.cli import app
from vllm_kvselect.config import EvictionConfig
from vllm_kvselect.planning.cuts import cuts
from vllm_kvselect.registry import METHODS
from vllm_kvselect.tiny_model import tiny_model


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment)


def rows(result: Result) -> dict[str, str]:
    lines = (line.strip().split("  ") for line in result.stdout.splitlines())
    return {cells[0]: cells[-1].strip() for cells in lines if len(cells) > 1}


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"{__version__}\n"


def test_no_command_shows_the_help() -> None:
    result = run()
    for command in ("tiny-model", "methods", "plan", "evaluate"):
        assert command in result.output


def test_methods_are_readable_in_a_narrow_terminal_and_in_a_file() -> None:
    result = run("methods", COLUMNS="80")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "…" not in result.stdout
    words = " ".join(result.stdout.split())
    for name, method in METHODS.items():
        facts = f"{name} retains {method.summary} cost per layer {method.cost} limits"
        assert f"{facts} {method.limits} published in {method.paper}" in words


def test_tiny_model_prints_the_folder_and_nothing_else() -> None:
    folder = tiny_model()
    result = run("tiny-model")
    assert result.exit_code == 0
    assert result.stdout == f"{folder}\n"


def test_fast_dtype_prints_what_dtype_takes_and_nothing_else() -> None:
    result = run("fast-dtype")
    assert result.exit_code == 0
    assert result.stdout in ("bfloat16\n", "float32\n")


def test_plan_shows_what_is_freed() -> None:
    result = run("plan", "--prompt-len", "1556", "--budget", "256")
    assert result.exit_code == 0
    (cut,) = cuts(1556, 32, EvictionConfig(method="adakv-perturb", budget=256))
    assert rows(result) == {
        "method": "layer-probe",
        "cut while computed": "every 2048 tokens",
        "entries retained": "276 of 1556 per KV head",
        "blocks packed": str(cut.num_packed),
        "blocks of the tail": "2",
        "blocks freed": f"{cut.first_packed} of 49",
        "most blocks held": "49",
    }


def test_plan_counts_pages_of_larger_blocks() -> None:
    command = ("plan", "--prompt-len", "32768", "--budget", "2048", "--block-size", "544")
    found = rows(run(*command, "--page-size", "32"))
    # The window and the tail's page: 2,048 entries kept, and what does not fill a page.
    assert found["entries retained"] == "2048 of 32768 per KV head"
    assert found["blocks freed"] == f"{(32768 - 2048) // 544} of 61"
    assert run(*command, "--page-size", "48").exit_code == 2


def test_plan_shows_the_most_that_a_prompt_holds_with_cuts_in_it() -> None:
    command = ("plan", "--prompt-len", "32768", "--budget", "2048", "--method", "keydiff")
    assert rows(run(*command))["most blocks held"] == "1024"
    by_default = rows(run(*command[:5]))  # as `auto` cuts, where there is a probe
    assert by_default["most blocks held"] == str((2048 + 2 * 2048) // 32)
    bounded = rows(run(*command, "--prompt-interval", "512"))
    assert bounded["most blocks held"] == str((2048 + 2 * 512) // 32)
    assert bounded["blocks freed"] == rows(run(*command))["blocks freed"]


@pytest.mark.parametrize("budget", ["0.25", "250"])
def test_plan_takes_a_fraction_or_a_number(budget: str) -> None:
    command = ("plan", "--prompt-len", "1000", "--block-size", "10", "--window", "10")
    result = run(*command, "--method", "snapkv", "--budget", budget)
    assert rows(result)["entries retained"] == "250 of 1000 per KV head"
    assert rows(result)["blocks freed"] == "75 of 100"


def test_plan_that_frees_nothing_says_so() -> None:
    result = run("plan", "--prompt-len", "100")
    assert rows(result)["blocks freed"] == "0 of 4"
    assert "runs as in stock vLLM" in result.stdout


@pytest.mark.parametrize(
    ("budget", "reason"),
    [
        ("10", "budget = 10 retains 10 entries of 1000 tokens; at least 64 are needed"),
        ("63", "budget = 63 retains 63 entries of 1000 tokens; at least 64 are needed"),
        ("0.05", "budget = 0.05 retains 50 entries of 1000 tokens; at least 64 are needed"),
    ],
)
def test_plan_refuses_the_budget_that_a_server_refuses(budget: str, reason: str) -> None:
    result = run("plan", "--prompt-len", "1000", "--budget", budget)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {reason}, the window of 32 and 1 page(s) of 32")
    assert ("--max-model-len" in result.stderr) == (budget == "0.05")


def test_plan_takes_a_fraction_that_is_enough_of_the_longest_prompt() -> None:
    command = ("plan", "--prompt-len", "1000", "--budget", "0.05", "--max-model-len", "8192")
    assert rows(run(*command))["blocks freed"] == "29 of 32"
    assert run("plan", "--prompt-len", "40", "--budget", "64", "--method", "none").exit_code == 0


def test_model_that_cannot_be_made_is_one_line_on_stderr() -> None:
    result = run("tiny-model", XDG_CACHE_HOME="/dev/null")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "error: cannot write /dev/null/vllm-kvselect" in result.stderr

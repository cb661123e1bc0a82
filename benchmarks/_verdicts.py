"""The table of models: a row for each family, kept in a document."""

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from _engine import BenchmarkError
from _families import FAMILIES

BEGIN, END = "<!-- table: benchmarks/models.py -->", "<!-- end of the table -->"
HEADER = "| family | architecture | verdict | streaming-llm | adakv-perturb | remark |"


@dataclass(frozen=True)
class Row:
    """What came of a family.

    Attributes:
        family: Its name.
        architecture: vLLM's name.
        verdict: served, refused, untried or WRONG.
        differences: For each of the two methods, how far the answer is from that of transformers.
        remark: One line.
    """

    family: str
    architecture: str
    verdict: str
    differences: tuple[str, str] = ("", "")
    remark: str = ""

    def __str__(self) -> str:
        cells = (self.family, self.architecture, self.verdict, *self.differences, self.remark)
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


class Table:
    """The table in a document, between two comments; what is around it is left alone.

    Attributes:
        rows: Lines of the table by family.
    """

    def __init__(self, document: Path) -> None:
        self._document = document
        text = document.read_text(encoding="utf-8")
        if BEGIN not in text or END not in text:
            raise BenchmarkError(f"{document} has no place for the table: {BEGIN} and {END}")
        self._before, rest = text.split(BEGIN)
        inside, self._after = rest.split(END)
        lines = [line for line in inside.splitlines() if line.startswith("| ")]
        self.rows = {line.split(" | ")[0].removeprefix("| "): line for line in lines[2:]}

    def write(self, row: Row) -> None:
        """Adds or replaces a row, and writes the document."""
        self.rows[row.family] = str(row)
        order = [family.name for family in FAMILIES if family.name in self.rows]
        lines = [HEADER, "| --- | --- | --- | --- | --- | --- |", *map(self.rows.get, order)]
        made = f"Made with vLLM {version('vllm')}, transformers {version('transformers')}."
        body = "\n".join([BEGIN, "", made, "", *map(str, lines), "", END])
        self._document.write_text(self._before + body + self._after, encoding="utf-8")

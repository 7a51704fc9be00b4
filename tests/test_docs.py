"""The documentation's code runs as it stands, its commands exist, and no page or public name is missing."""

from __future__ import annotations

import re

import gpu_record
import numpy as np
import pytest

import cupy_paged
from cupy_paged.__main__ import COMMANDS

DOCS = gpu_record.ROOT / "docs"
PAGES = sorted((DOCS / "pages").glob("*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
# libraries.md has one block a library, which test_libraries.py runs where the library is.
WITH_CODE = [p for p in PAGES if PYTHON.search(p.read_text()) and p.stem != "libraries"]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.stem)
def test_blocks_of_a_page_run_in_order(page):
    text = page.read_text()
    blocks = PYTHON.findall(text)
    assert len(blocks) == text.count("```python"), "a block is indented or not closed"
    scope: dict = {}
    for block in blocks:
        assert "assert " in block, "an example shows what comes out"
        exec(compile(block, f"{page.name}", "exec"), scope)
    for name, value in scope.items():
        if isinstance(value, np.ndarray) and name in ("out", "lse", "merged", "whole"):
            assert np.isfinite(value.astype("float32")).all()


@pytest.mark.parametrize("page", [gpu_record.ROOT / "README.md", *PAGES], ids=lambda p: p.stem)
def test_commands_exist(page):
    for command in re.findall(r"python -m cupy_paged (\w+)", page.read_text()):
        assert command in COMMANDS


def test_every_page_is_in_the_navigation():
    named = re.findall(r"^ {2}- .*: (\S+\.md)$", (DOCS / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == [p.name for p in PAGES]


def test_every_public_name_is_in_the_reference():
    named = re.findall(
        r"^::: cupy_paged\.((?!distributed|communicators)\w+)$", (DOCS / "pages" / "api.md").read_text(), re.MULTILINE
    )
    assert sorted(named) == sorted(n for n in cupy_paged.__all__ if n != "__version__")


def test_links_between_pages_lead_somewhere():
    links = [(p.name, to) for p in PAGES for to in re.findall(r"\]\(([\w-]+\.md)\)", p.read_text())]
    assert links
    for page, to in links:
        assert (DOCS / "pages" / to).exists(), f"{page} links to {to}"

"""The site of docs/: each page is in the navigation and can be reached, and links out of docs/ lead somewhere."""

from __future__ import annotations

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
SETTINGS = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def navigation() -> list[str]:
    return re.findall(r"([\w/-]+\.md)$", SETTINGS.partition("\nnav:\n")[2], re.MULTILINE)


def rewrite(markdown: str, page: str, repository: str) -> str:
    spec = importlib.util.spec_from_file_location("repository_links", DOCS / "repository_links.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.rewrite(markdown, page, repository)


def test_the_navigation_has_every_page_once() -> None:
    assert sorted(navigation()) == PAGES


def test_every_page_can_be_reached_by_links_from_the_index() -> None:
    reached: set[str] = set()
    waiting = ["index.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            links = re.findall(r"\]\(([^)#:]+\.md)", (DOCS / page).read_text(encoding="utf-8"))
            targets = [posixpath.normpath(posixpath.join(posixpath.dirname(page), link)) for link in links]
            waiting += [target for target in targets if not target.startswith("..")]
    assert sorted(reached) == PAGES


@pytest.mark.parametrize("page", PAGES)
def test_no_link_of_the_site_leaves_the_docs(page: str) -> None:
    text = rewrite((DOCS / page).read_text(encoding="utf-8"), page, "")
    folder = posixpath.dirname(page)
    for target in re.findall(r"\]\(([^)#:]+)[)#]", text):
        assert (DOCS / folder / target).is_file(), target
        assert not posixpath.normpath(posixpath.join(folder, target)).startswith(".."), target


def test_links_out_of_the_docs_become_the_repositorys_or_name_the_path() -> None:
    text = "see [the loss](../../src/b.py), [x](y.md), [other](../page.md) and ![z](../../z.png)"
    seen = "see the loss (`src/b.py`), [x](y.md), [other](../page.md) and ![z](../../z.png)"
    assert rewrite(text, "decisions/1.md", "") == seen
    assert rewrite("[`types.py`](../src/types.py)", "x.md", "") == "`types.py`"
    assert rewrite("[b](../src/b.py)", "x.md", "https://host/o/r/") == "[b](https://host/o/r/blob/main/src/b.py)"
    block = "```\n[b](../src/b.py)\n```"
    assert rewrite(block, "x.md", "") == block


def test_the_site_asks_no_other_host() -> None:
    assert "font: false" in SETTINGS
    assert "offline" not in SETTINGS.partition("plugins:")[2]  # its search loads a script from a CDN
    assert "http" not in (DOCS / "site.css").read_text(encoding="utf-8")

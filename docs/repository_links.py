"""A hook of the docs site: links that leave docs/ lead to the repository.

In the repository `[rollout](../src/offbeat/rollout)` is a relative link. The site has no such page: with `repo_url` in
mkdocs.yml the link goes there, without it the text stays and names the path. Code blocks are left alone.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def rewrite(markdown: str, page: str, repository: str) -> str:
    """The page with its links out of docs/ replaced. `page`: its path in docs/; `repository`: an address, or empty."""

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if "://" in target or target.startswith("#") or path.split("/")[0] == "docs":
            return match[0]
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/main/{path})"
        return text if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    parts = FENCED.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in parts)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs for each page."""
    del files
    return rewrite(markdown, page.file.src_uri, config.repo_url or "")

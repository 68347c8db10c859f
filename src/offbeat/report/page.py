"""The page: one HTML file with its scripts, styles and data inside, and a policy that lets it load nothing else.

<meta Content-Security-Policy>   default-src 'none'; only the scripts and styles below, by their digests
<style> …                        uPlot's, ours
<script type="application/json"> the value; `<` is \\u003c, so no text in it can end the element
<script type="text/plain">       packed samples and events: base64
<script> …                       uPlot, ours
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from offbeat.durable import replace_file
from offbeat.report.collect import Report

STYLES = ("vendor/uPlot.min.css", "page.css")
SCRIPTS = ("vendor/uPlot.iife.min.js", "text.js", "charts.js", "panels.js", "timeline.js", "samples.js", "page.js")


def page(report: Report) -> Iterator[str]:
    """The text of the page, in parts."""
    styles = [_template(name) for name in STYLES]
    scripts = [_template(name) for name in SCRIPTS]
    policy = content_policy(scripts, styles)
    title = html.escape(f"{report.value['header']['name']} · offbeat report")
    before, _, after = _template("page.html").partition("<!-- content -->")
    yield (
        before.replace("<!-- policy -->", policy)
        .replace("<!-- title -->", title)
        .replace("<!-- styles -->", "\n".join(f"<style>{style}</style>" for style in styles))
    )
    yield f'<script type="application/json" id="value">{embedded_json(report.value)}</script>\n'
    yield f'<script type="text/plain" id="events">{report.events}</script>\n'
    yield f'<script type="text/plain" id="samples-index">{report.samples.index}</script>\n'
    for number, chunk in enumerate(report.samples.chunks):
        yield f'<script type="text/plain" id="samples-{number}">{chunk}</script>\n'
    yield "\n".join(f"<script>{script}</script>" for script in scripts)
    yield after


def embedded_json(value: Any) -> str:
    """JSON that can stand inside a script element: ASCII without `<`."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def content_policy(scripts: list[str], styles: list[str]) -> str:
    """No network, no frames, no forms, no plug-ins: these scripts and styles only."""
    script, style = (" ".join(map(_digest, found)) for found in (scripts, styles))
    return f"default-src 'none'; script-src {script}; style-src {style}; base-uri 'none'; form-action 'none'"


def _digest(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def _template(name: str) -> str:
    return files("offbeat.report").joinpath("template", *name.split("/")).read_text(encoding="utf-8")


def write_page(report: Report, path: Path) -> int:
    """A reader sees the old page or the new one. Returns its bytes. Raises `OSError`."""
    replace_file(path, (part.encode() for part in page(report)), shared=True)
    return path.stat().st_size

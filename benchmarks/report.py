"""How large and how quick the report of a long run is: `python benchmarks/report.py [--steps 400 --prompts 64]`.

Writes a recorded run into a temporary folder and prints seconds and peak memory to make the page and its bytes; with
Chromium on PATH also seconds to the first chart and to the first samples, seconds of a search through all texts, and
the size of the JavaScript heap.
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from offbeat.testing.recorded_run import Recorded, write_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--run", type=Path, help="an existing run in place of a recorded one")
    words = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        run = words.run or Path(temporary) / "run"
        if words.run is None:
            write_run(
                run,
                Recorded(steps=words.steps, prompts_per_step=words.prompts, samples_per_prompt=words.samples),
            )
        page = Path(temporary) / "report.html"
        make(run, page)
        look(page, Path(temporary))


def make(run: Path, page: Path) -> None:
    started = time.monotonic()
    command = [sys.executable, "-m", "offbeat.cli", "report", str(run), "--output", str(page)]
    subprocess.run(command, check=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    told("made in", f"{time.monotonic() - started:.1f} s wall, {used.ru_utime + used.ru_stime:.1f} s CPU")
    told("peak memory", f"{used.ru_maxrss / 1e3:.0f} MB")
    told("samples.jsonl", f"{sum(p.stat().st_size for p in run.glob('samples*.jsonl')) / 1e6:.1f} MB")
    told("page", f"{page.stat().st_size / 1e6:.2f} MB")


def look(page: Path, folder: Path) -> None:
    driver = chromium_driver()
    if driver.executable() is None:
        told("browser", "no Chromium on PATH")
        return
    with driver.chromium(folder / "profile") as browser:
        browser.call("Performance.enable")
        browser.open(page)
        paint = browser.evaluate(
            "[...performance.getEntriesByType('mark')].filter((one) => one.name === 'charts')[0].startTime"
        )
        told("charts drawn", f"{paint / 1e3:.2f} s after the start of loading")
        started = time.monotonic()
        browser.wait_for("document.querySelectorAll('.sample').length > 0")
        told("first samples", f"{paint / 1e3 + time.monotonic() - started:.2f} s")
        told("heap", heap(browser))
        started = time.monotonic()
        browser.evaluate(
            "document.getElementById('pick-text').value = 'no such text';"
            "document.getElementById('pick-text').dispatchEvent(new Event('input'))"
        )
        browser.wait_for("document.getElementById('samples-count').textContent === 'No sample fits.'")
        told("search of all", f"{time.monotonic() - started:.2f} s")
        told("heap", heap(browser))
        told("problems", str(browser.problems or "none"))


def chromium_driver() -> ModuleType:
    """The module with which the tests drive a browser: it is no part of the package."""
    path = Path(__file__).parents[1] / "tests" / "integration" / "chromium.py"
    spec = importlib.util.spec_from_file_location("chromium", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def heap(browser: Any) -> str:
    """Used JavaScript heap, before and after garbage is collected."""
    found = [_metric(browser, "JSHeapUsedSize")]
    browser.call("HeapProfiler.collectGarbage")
    found.append(_metric(browser, "JSHeapUsedSize"))
    return f"{found[0]:.1f} MB, {found[1]:.1f} MB after a collection"


def _metric(browser: Any, name: str) -> float:
    return next(one["value"] for one in browser.call("Performance.getMetrics")["metrics"] if one["name"] == name) / 1e6


def told(name: str, words: str) -> None:
    print(f"{name:<14} {words}", flush=True)


if __name__ == "__main__":
    main()

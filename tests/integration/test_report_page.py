"""The report in headless Chromium: no error, no request, charts drawn, hostile text inert, samples found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Browser, chromium, executable
from tiny_run import command

from offbeat.metrics.writer import encode_line
from offbeat.testing.recorded_run import Recorded, write_run

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(executable() is None, reason="needs Chromium (Debian: apt-get install chromium)"),
]

HOSTILE = "</script><img src=http://example.com/x onerror='document.title=\"taken\"'>\x1b[31m\u202edesrever\u2066"
STEPS = 24


@pytest.fixture(scope="module", name="browser")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module", name="page")
def _page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "sums"
    write_run(run, Recorded(steps=STEPS, prompts_per_step=4, samples_per_prompt=4, eval_every=8, eval_prompts=6))
    ended = command("report", run)
    assert ended.code == 0, ended.told
    return run / "report.html"


@pytest.fixture(scope="module", name="hostile_page")
def _hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "<img src=x onerror=alert(1)>"
    write_run(run, Recorded(steps=4, prompts_per_step=2, samples_per_prompt=2, eval_every=2, eval_prompts=2))
    sample: dict[str, Any] = {"step": 3, "eval": None, "prompt_id": HOSTILE, "sample_index": 0, "epoch": 1}
    sample |= {"source": HOSTILE, "prompt": HOSTILE, "completion": HOSTILE, "reward": -5.0, "engine": HOSTILE}
    sample |= {"parts": {HOSTILE: 1.0, "b": 2.0}, "errors": [HOSTILE], "finish_reason": HOSTILE, "versions": [[2, 7]]}
    with (run / "samples.jsonl").open("ab") as file:
        file.write(encode_line(sample | {"advantage": -1.0, "prompt_tokens": 3, "completion_tokens": 7}))
        file.write(encode_line(sample | {"eval": HOSTILE, "completion": "x" * 1_000_000}))
    with (run / "metrics.jsonl").open("ab") as file:
        record = {"step": 4, "reward_mean": 0.1, f"reward/{HOSTILE}": 1.0, HOSTILE: 2.0, "nonfinite": [HOSTILE]}
        file.write(encode_line(record | {f"eval/{HOSTILE.replace('/', '')}/avg@4": 0.5, "reward_errors": 3}))
    with (run / "trace.json").open("ab") as file:
        event = {"ph": "X", "pid": 9, "tid": 0, "name": HOSTILE, "cat": HOSTILE, "ts": 1, "dur": 10**7}
        file.write(json.dumps(event).encode() + b",\n")
    (run / "config.json").write_text(json.dumps({"model": HOSTILE, HOSTILE: HOSTILE, "steps": 5}))
    ended = command("report", run)
    assert ended.code == 0, ended.told
    return run / "report.html"


def no_problem(browser: Browser, page: Path) -> None:
    assert browser.problems == []
    assert browser.requests == [page.as_uri()]


def shown_samples(browser: Browser) -> str:
    """The words over the list, once the list is there."""
    browser.wait_for("/sample/.test(document.getElementById('samples-count')?.textContent ?? '')")
    return browser.evaluate("document.getElementById('samples-count').textContent")


def pick(browser: Browser, name: str, value: str, words: str) -> None:
    """Sets a filter as a person does, and waits for these words over the list."""
    event = "input" if name == "text" else "change"
    browser.evaluate(
        f"(() => {{ const node = document.getElementById('pick-{name}'); node.value = {json.dumps(value)};"
        f" node.dispatchEvent(new Event('{event}')); }})()"
    )
    browser.wait_for(f"document.getElementById('samples-count').textContent === {json.dumps(words)}")


def completions(browser: Browser) -> list[str]:
    return browser.evaluate("[...document.querySelectorAll('#samples-list .text')].map((node) => node.textContent)")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [800, 1280])
def test_the_page_draws_all_charts_in_any_theme_and_width(browser: Browser, page: Path, dark: bool, width: int) -> None:
    browser.open(page, dark=dark, width=width)
    assert browser.evaluate("document.documentElement.dataset.theme") == ("dark" if dark else "light")
    drawn = browser.evaluate("document.querySelectorAll('.uplot canvas').length")
    assert drawn == int(browser.evaluate("document.documentElement.dataset.ready")) >= 20
    painted = (
        "[...document.querySelectorAll('canvas')].every((canvas) => new Uint32Array(canvas.getContext('2d')"
        ".getImageData(0, 0, canvas.width, canvas.height).data.buffer).some((pixel) => pixel !== 0))"
    )
    browser.wait_for(painted)
    assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    no_problem(browser, page)


def test_the_theme_can_be_changed(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.getElementById('theme').click()")
    assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(246, 247, 249)"


def test_samples_are_filtered_by_set_step_and_text_and_sorted(browser: Browser, page: Path) -> None:
    browser.open(page)
    everything = f"{STEPS * 4 + 4 * 6} prompts with {STEPS * 16 + 4 * 24} samples"
    browser.wait_for(f"document.getElementById('samples-count')?.textContent === {json.dumps(everything)}")
    pick(browser, "set", "0", f"{STEPS * 4} prompts with {STEPS * 16} samples")
    pick(browser, "step", "7", "4 prompts with 16 samples")
    browser.evaluate("document.getElementById('pick-groups').click()")
    browser.wait_for("document.getElementById('samples-count').textContent === '16 samples'")
    samples = [json.loads(line) for line in (page.parent / "samples.jsonl").read_text().splitlines()]
    own = [one for one in samples if one["step"] == 7 and one["eval"] is None]
    browser.evaluate("document.getElementById('pick-order').value = 'longest'")
    pick(browser, "step", "7", "16 samples")
    longest = max(own, key=lambda one: one["completion_tokens"])
    browser.wait_for(
        f"document.querySelectorAll('#samples-list .text')[1].textContent === {json.dumps(longest['completion'])}"
    )
    answer = own[3]["completion"].rsplit(" ", 1)[1]
    fitting = sum(answer.lower() in (one["prompt"] + "\n" + one["completion"]).lower() for one in own)
    pick(browser, "text", answer, "1 sample" if fitting == 1 else f"{fitting} samples")
    assert browser.evaluate("document.querySelectorAll('#samples-list mark').length") >= 1
    pick(browser, "text", "no such text anywhere", "No sample fits.")
    no_problem(browser, page)


def test_a_chart_can_be_used_with_the_keyboard_and_leads_to_the_samples_of_a_step(browser: Browser, page: Path) -> None:
    browser.open(page)
    shown_samples(browser)
    browser.evaluate("document.querySelector('.plot').focus()")
    for key in ("Home", "ArrowRight", "ArrowRight"):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    browser.wait_for("document.querySelector('.legend .at').textContent === 'step 2'")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter")
    browser.wait_for("document.getElementById('samples-count').textContent.startsWith('4 prompts with 16')")
    assert browser.evaluate("document.getElementById('pick-step').value") == "2"
    no_problem(browser, page)


def test_every_chart_has_a_table_and_words(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("document.querySelectorAll('.chart button').forEach((button) => button.click())")
    charts = browser.evaluate("document.querySelectorAll('.chart').length")
    assert browser.evaluate("document.querySelectorAll('.chart table').length") == charts
    rows = browser.evaluate("document.querySelector('.chart table tbody').rows.length")
    assert rows == STEPS
    words = browser.evaluate("[...document.querySelectorAll('.plot')].map((node) => node.getAttribute('aria-label'))")
    assert all("first " in text and "highest " in text for text in words)


def test_the_timeline_zooms(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.wait_for("document.querySelectorAll('.timeline .tools button').length > 0")
    look = "document.querySelector('.timeline canvas').toDataURL()"
    before = browser.evaluate(look)
    browser.evaluate("document.querySelector('.timeline [aria-label=\"Zoom in\"]').click()")
    browser.wait_for(f"{look} !== {json.dumps(before)}")
    busy = browser.evaluate("document.querySelector('.timeline table').textContent")
    assert "trainer-0" in busy
    assert "engine-1" in busy
    no_problem(browser, page)


def test_text_of_a_model_stays_text(browser: Browser, hostile_page: Path) -> None:
    browser.open(hostile_page)
    shown_samples(browser)
    browser.evaluate("document.querySelectorAll('details').forEach((one) => one.open = true)")
    browser.evaluate("document.querySelectorAll('.chart button').forEach((button) => button.click())")
    browser.evaluate("document.getElementById('pick-order').value = 'worst'")
    pick(browser, "text", "onerror", "2 prompts with 2 samples")
    shown = "\n".join(completions(browser))
    assert "<img src=http://example.com/x onerror=" in shown
    assert "\x1b" not in shown
    assert "␛[31m⟨U+202E⟩desrever⟨U+2066⟩" in shown
    assert browser.evaluate("document.querySelectorAll('img, iframe, object, embed, link').length") == 0
    assert "\u202e" not in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.title").startswith("<img src=x onerror=alert(1)> · ")
    no_problem(browser, hostile_page)


def test_the_policy_stops_what_would_get_past_the_escaping(browser: Browser, page: Path) -> None:
    browser.open(page)
    insert = "(() => { const node = document.createElement('%s'); %s; document.body.append(node); })()"
    browser.evaluate(insert % ("script", "node.textContent = 'document.title = \"taken\"'"))
    browser.evaluate(insert % ("img", "node.src = 'http://127.0.0.1:9/x.png'"))
    browser.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    assert browser.evaluate("document.title") == "sums · offbeat report"
    assert len([text for text in browser.problems if "Content Security Policy" in text]) >= 3


@pytest.mark.parametrize("kept", ["", "config.json", "metrics.jsonl", "samples.jsonl", "trace.json"])
def test_a_page_of_nearly_nothing_is_a_page(browser: Browser, page: Path, tmp_path: Path, kept: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "journal.jsonl").touch()
    if kept:
        (run / kept).write_bytes((page.parent / kept).read_bytes())
    assert command("report", run).code == 0
    browser.open(run / "report.html")
    assert browser.evaluate("document.querySelectorAll('section').length") >= 7
    no_problem(browser, run / "report.html")

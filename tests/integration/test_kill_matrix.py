"""Some cells of the kill matrix, one for each thing that can come of them; `benchmarks/kill_matrix.py` runs all."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import write_project

from offbeat.faults import parse_faults
from offbeat.testing.kill_cells import OUTCOMES, PHASES, SIGNALS, TARGETS, Cell, cells
from offbeat.testing.kill_run import Bench, differences
from offbeat.testing.leaks import no_leaks

pytestmark = pytest.mark.integration

CHOSEN = (
    Cell("reward-0", "rollout", "kill", 1),
    Cell("controller", "rollout", "kill", 1),
    Cell("controller", "sync", "stop", 0),
)


@pytest.fixture(scope="module", name="bench")
def _bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("kill-matrix")
    return Bench(write_project(folder / "project"), folder / "runs", patience=3.0)


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    with no_leaks(timeout_s=10.0, adopt=True):
        yield


@pytest.mark.parametrize("cell", CHOSEN, ids=lambda cell: cell.name)
def test_a_run_that_is_hit_ends_or_heals_as_it_must_and_its_resume_is_exact(bench: Bench, cell: Cell) -> None:
    report = bench.run(cell)
    assert report.problems == []
    assert (report.left, report.lost, report.twice) == ([], 0, 0)
    if cell.staleness == 0:
        assert report.exact
    if cell.outcome in ("fails", "vanishes", "saves and stops"):
        assert report.resumed_at in (1, 2)


def test_the_table_has_every_cell_once_and_each_fault_hits_the_process_of_its_cell() -> None:
    found = list(cells())
    assert len(set(found)) == len(found)
    pairs = Counter((cell.target, cell.phase, cell.signal) for cell in found if cell.signal in SIGNALS)
    assert len(pairs) == len(TARGETS) * len(PHASES) * len(SIGNALS) == 72
    assert set(pairs.values()) == {2}, "at max_staleness 0 and 1"
    assert {cell.outcome for cell in found} == set(OUTCOMES)
    for cell in found:
        (fault,) = parse_faults(cell.faults)
        assert (fault.target, fault.action) == (cell.target, cell.signal.split(",")[0])
        assert fault.at is not None


def test_two_runs_that_differ_in_one_number_are_told_apart(bench: Bench, tmp_path: Path) -> None:
    """What the matrix judges by is itself held to something."""
    whole = bench.whole(0)
    assert differences(whole, whole) == []
    other = Path(shutil.copytree(whole, tmp_path / "other"))
    for name, key, value in (("metrics.jsonl", "time_step_s", 1e6), ("metrics.jsonl", "loss", 1e6)):
        *lines, last = (json.loads(line) for line in (other / name).read_text().splitlines())
        lines[-1][key] = value
        (other / name).write_text("".join(json.dumps(line) + "\n" for line in [*lines, last]))
        expected = ["metrics.jsonl differs from that of the uninterrupted run"] if key == "loss" else []
        assert differences(other, whole) == expected

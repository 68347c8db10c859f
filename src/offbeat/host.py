"""What a run needs of this machine: devices, a collective backend, an address, the engines' interpreter.

Kept apart from what a config needs in itself, so that `offbeat check` can look at a config on a machine that could not
run it. No process of the run is started; another interpreter is asked a short question.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

from offbeat.config import Config
from offbeat.devices import choose_device
from offbeat.errors import ConfigError, WeightSyncError
from offbeat.install import pip_install
from offbeat.memory import Lengths, ModelShape, estimate_memory
from offbeat.metrics import figures
from offbeat.network import listen
from offbeat.trackers import require_trackers

ASK_S = 20.0
_MARK = "offbeat:"
_QUESTION = (
    "import importlib.util as u, offbeat.rpc.server; "
    f"print('{_MARK}', *[name for name in ('torch', 'transformers') if u.find_spec(name) is None])"
)


def require_host(config: Config) -> None:
    """Raises `ConfigError` with everything that this machine lacks."""
    problems = host_problems(config)
    if problems:
        raise ConfigError(*problems)


def host_problems(config: Config, *, ask: bool = True) -> list[str]:
    """One sentence for each thing that this machine lacks. Loads torch; `ask` False starts no other interpreter."""
    python = config.rollout.python
    problems = [
        *_device_problems("trainer", config.trainer.device),
        *_problems(partial(_require_backend, config.weights.backend)),
        *_problems(partial(require_trackers, config)),
        *(f"weights.host: {text}" for text in _problems(partial(_require_address, config.weights.host))),
    ]
    if python is None:
        problems += _device_problems("rollout", config.rollout.device)
    elif ask:
        problems += _problems(partial(_ask, python))
    return list(dict.fromkeys(problems))


def memory_problem(config: Config, shape: ModelShape, lengths: Lengths, there: int | None = None) -> str | None:
    """A sentence where the processes on the CPU need more than the machine has (`there`, bytes). Loads torch."""
    there = machine_memory() if there is None else there
    need = _on_cpu(config, shape, lengths)
    if there is None or need <= there:
        return None
    found = f"about {figures.size(need)} together on the CPU, and this machine has {figures.size(there)}"
    trainer = config.trainer
    smallest = config.model_copy(update={"trainer": trainer.model_copy(update={"micro_batch_tokens": 1})})
    least = _on_cpu(smallest, shape, lengths)
    if least <= there:
        budget = trainer.micro_batch_tokens
        return f"{found}: lower trainer.micro_batch_tokens (now {budget:,}); it changes memory and time only."
    return (
        f"{found}; with the lowest trainer.micro_batch_tokens still about {figures.size(least)}: use a smaller model, "
        "fewer rollout.replicas or rollout.max_rows, or a larger machine."
    )


def _on_cpu(config: Config, shape: ModelShape, lengths: Lengths) -> int:
    memory = estimate_memory(config, shape, lengths)
    return memory.trainer * _is_cpu(config.trainer.device) + (
        memory.engine * config.rollout.replicas * _is_cpu(config.rollout.device)
    )


def _is_cpu(device: str) -> bool:
    try:
        return choose_device(device).type == "cpu"
    except ConfigError:  # none of this machine
        return False


def machine_memory() -> int | None:
    """Bytes of main memory, less where a container has less; None where the system does not tell."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        limit = ""
    return min(found, int(limit)) if limit.isdigit() else found


def _problems(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as error:
        return list(error.problems)
    except WeightSyncError as error:
        return [str(error)]
    return []


def _device_problems(section: str, device: str) -> list[str]:
    return [f"{section}.{text}" for text in _problems(partial(choose_device, device))]


def _require_backend(backend: str) -> None:
    from offbeat.weights.group import require_backend

    require_backend(backend)


def _require_address(host: str) -> None:
    listen(host)[0].close()


def _ask(python: str) -> None:
    """Does the other interpreter start, and has it what an engine needs?"""
    what = f"rollout.python = {python!r}"
    if shutil.which(python) is None:
        raise ConfigError(
            f"{what}: no such program; give the path of a Python interpreter that has offbeat installed, "
            "e.g. /path/to/venv/bin/python."
        )
    try:
        answer = subprocess.run(
            [python, "-P", "-c", _QUESTION],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ASK_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{what}: cannot be run ({error}); give the path of a Python interpreter.") from error
    last = (answer.stderr.strip().splitlines() or [""])[-1]
    if answer.returncode == 0 and answer.stdout.startswith(_MARK):
        missing = answer.stdout.removeprefix(_MARK).split()
        if not missing:
            return
        raise ConfigError(f"{what}: it has no {' and no '.join(missing)}; run {pip_install('train', python=python)}.")
    if "No module named" in last:
        raise ConfigError(f"{what}: {last}; run {pip_install('train', python=python)}.")
    if "-P" in answer.stderr:
        raise ConfigError(f"{what}: it is older than Python 3.11, which offbeat needs; give a newer one.")
    seen = f" ({last[:200]})" if last else ""
    raise ConfigError(f"{what}: it is no Python interpreter that can import offbeat{seen}; give the path of one.")

"""What a run needs of this machine: devices, a collective backend, an address, the engines' interpreter.

Kept apart from what a config needs in itself, so that `offbeat check` can look at a config on a machine that could not
run it. No process of the run is started; another interpreter is asked a short question.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from functools import partial

from offbeat.config import Config
from offbeat.devices import choose_device
from offbeat.errors import ConfigError, WeightSyncError
from offbeat.install import pip_install
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

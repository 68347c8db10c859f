"""offbeat: reinforcement-learning post-training in which generation and training overlap.

    import offbeat
    result = offbeat.run("run.toml", reward=my_function)

Importing this package loads neither torch nor any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from offbeat.commands.train import run
    from offbeat.config import Config, load_config
    from offbeat.training import RunResult

__all__ = ["Config", "RunResult", "__version__", "load_config", "run"]


def __getattr__(name: str) -> Any:
    if name in ("Config", "load_config"):
        from offbeat import config

        return getattr(config, name)
    if name == "RunResult":
        from offbeat.training import RunResult

        return RunResult
    if name == "run":
        from offbeat.commands.train import run

        return run
    raise AttributeError(f"module 'offbeat' has no attribute {name!r}")

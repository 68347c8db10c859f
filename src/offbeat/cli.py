"""The commands. Exit codes: 0 done, 1 the run failed, 2 bad usage or config, 130 interrupted (state saved).

A problem of the user's input is found before any process starts and printed as one sentence each. Nothing heavy is
imported until a command needs it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import offbeat
from offbeat.errors import ConfigError, OffbeatError

if TYPE_CHECKING:
    from offbeat.training import RunResult

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement-learning post-training in which generation and training overlap.",
)

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Override config keys, e.g. trainer.lr=1e-5.")
]
ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results and warnings only.")]


def _version(show: bool) -> None:
    if show:
        typer.echo(f"offbeat {offbeat.__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction] (typer calls it)
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    del version


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; default: runs/<config name>-<time>.")] = None,
    quiet: Quiet = False,
) -> None:
    """Train a model."""
    from offbeat.commands import train as command
    from offbeat.config import load_config
    from offbeat.metrics.display import make_display

    loaded = load_config(config, overrides or ())
    _exit(command.train(loaded, name=config.stem, run_dir=run_dir, display=make_display(quiet=quiet)))


@app.command()
def resume(
    folder: RunPath,
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint to continue from; default: the newest.")] = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run from its newest complete checkpoint."""
    from offbeat.commands import train as command
    from offbeat.metrics.display import make_display

    _exit(command.resume(folder, overrides or (), step=step, display=make_display(quiet=quiet)))


@app.command(name="eval")
def evaluate(
    target: Annotated[Path, typer.Argument(metavar="CONFIG|RUN", help="A TOML file, or the folder of a run.")],
    overrides: Overrides = None,
    step: Annotated[int | None, typer.Option(help="Checkpoint of the run; default: the newest.")] = None,
    quiet: Quiet = False,
) -> None:
    """Evaluate a model, or a checkpoint of a run, on the held-out sets of its config."""
    from offbeat.commands.evaluate import evaluate_only
    from offbeat.metrics.display import make_display

    evaluate_only(target, overrides or (), step=step, display=make_display(quiet=quiet))


@app.command()
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show the token ids of the prompt.")] = False,
) -> None:
    """Check a config and its data without starting anything: a prompt, stop ids, batch arithmetic, memory."""
    from offbeat.commands.check import check as run_check
    from offbeat.config import load_config

    run_check(load_config(config, overrides or ()), tokens=tokens)


@app.command()
def audit(folder: RunPath) -> None:
    """Prove from a run's files that every sample was trained once or dropped for a reason. Exit 1: it was not so."""
    from offbeat.commands.audit import audit as run_audit

    if run_audit(folder).problems:
        raise typer.Exit(1)


@app.command()
def track(folder: RunPath) -> None:
    """Send to the trackers of a run what they have not had yet."""
    from offbeat.commands.track import track as send

    send(folder, say=typer.echo)


def _exit(result: RunResult) -> None:
    if result.interrupted:
        raise typer.Exit(130)


def main() -> None:
    """Entry point of the `offbeat` command."""
    try:
        app()
    except ConfigError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    except OffbeatError as error:
        print(f"error: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

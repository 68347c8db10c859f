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

    loaded, origin = load_config(config, overrides or ()), config.resolve().parent
    _exit(command.train(loaded, name=config.stem, origin=origin, run_dir=run_dir, display=make_display(quiet=quiet)))


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


@app.command(name="try")
def try_(
    config: ConfigPath,
    overrides: Overrides = None,
    prompts: Annotated[int, typer.Option("-n", help="Prompts; each is sampled samples_per_prompt times.")] = 16,
    warmup: Annotated[bool, typer.Option(help="Run the supervised [warmup] first, as a run would.")] = True,
    figures: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    samples: Annotated[
        Path | None, typer.Option(help="Write the samples to this file, for offbeat samples and rescore.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Sample and score a few prompts as the first step of a run would, before a run is started."""
    from offbeat.commands.trial import Outputs, try_config
    from offbeat.config import load_config
    from offbeat.metrics.display import make_display

    try_config(
        load_config(config, overrides or ()),
        prompts=prompts,
        warmup=warmup,
        outputs=Outputs(figures, samples),
        display=make_display(quiet=quiet),
    )


@app.command()
def samples(
    target: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="The folder of a run, or its samples.jsonl.")],
    worst: Annotated[bool, typer.Option("--worst", help="Lowest rewards first.")] = False,
    best: Annotated[bool, typer.Option("--best", help="Highest rewards first.")] = False,
    longest: Annotated[bool, typer.Option("--longest", help="Most tokens first.")] = False,
    step: Annotated[int | None, typer.Option(help="Of this step (with --eval: of this weights version).")] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Of this held-out set; default: training samples.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="Of the prompt with this id, e.g. data/12.")] = None,
    grep: Annotated[str | None, typer.Option(help="With this text in prompt or completion, in any case.")] = None,
    count: Annotated[int, typer.Option("-n", help="How many.")] = 5,
    group: Annotated[bool, typer.Option("--group", help="With all other samples of their prompts.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Show long texts whole.")] = False,
) -> None:
    """Read samples of a run: the newest, or the worst, best or longest ones."""
    from offbeat.commands.samples import Choice
    from offbeat.commands.samples import samples as show_samples
    from offbeat.metrics import recorded

    orders = {"worst": worst, "best": best, "longest": longest}
    chosen = [name for name, on in orders.items() if on]
    if len(chosen) > 1:
        raise ConfigError(f"--{chosen[0]} and --{chosen[1]} are two orders; choose one.")
    wanted = recorded.Wanted(step, evaluation, prompt, grep)
    order = getattr(recorded, chosen[0]) if chosen else None
    show_samples(target, Choice(wanted, order, count, groups=group, full=full))


@app.command()
def rescore(
    target: Annotated[Path, typer.Argument(metavar="RUN|FILE", help="The folder of a run, or its samples.jsonl.")],
    overrides: Overrides = None,
    rewards: Annotated[
        Path | None, typer.Option(help="A config whose rewards are used in place of those of the run.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of this step (with --eval: of this weights version).")] = None,
    evaluation: Annotated[
        str | None, typer.Option("--eval", help="Of this held-out set; default: training samples.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="At most about so many samples, whole groups.")] = None,
    changed_rows: Annotated[
        bool, typer.Option("--changed-rows", help="Use rows of the data that have changed since as they are now.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="Write the samples with their new scores to this file.")] = None,
) -> None:
    """Run a changed reward over recorded samples and compare it with the old one; the run stays as it is."""
    from offbeat.commands.rescore import rescore as run_rescore
    from offbeat.metrics.recorded import Wanted

    run_rescore(
        target,
        overrides or (),
        rewards=rewards,
        wanted=Wanted(step, evaluation),
        limit=limit,
        changed_rows=changed_rows,
        output=output,
    )


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    step: Annotated[int | None, typer.Option(help="Checkpoint to export; default: the newest.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The saved step that evaluated best.")] = False,
    metric: Annotated[
        str | None,
        typer.Option(
            help="What --best goes by: SET, SET/avg@k or SET/pass@k; default: checkpoint.best, or the first set."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32; default: bfloat16 if the base model is, else float32.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="A new folder; default: RUN/exports/step-<n>.")] = None,
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Push it to a hub, too (private).")] = None,
    public: Annotated[bool, typer.Option("--public", help="For all to see.")] = False,
) -> None:
    """Write the model of a checkpoint as a folder that transformers and vLLM load."""
    from offbeat.commands.export import Order
    from offbeat.commands.export import export as run_export

    if dtype not in (None, "bfloat16", "float32"):
        raise ConfigError(f"--dtype {dtype}: must be bfloat16 or float32.")
    run_export(folder, Order(step, best, metric, dtype, output, push, public))


@app.command()
def report(
    folder: RunPath,
    output: Annotated[Path | None, typer.Option(help="Where to write the page; default: RUN/report.html.")] = None,
    samples_mb: Annotated[float, typer.Option(min=0, max=500, help="Room for samples in the page.")] = 10,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Make one self-contained HTML page about a run, also while it trains: curves, timeline, alarms, samples."""
    from offbeat.commands import report as command
    from offbeat.metrics.figures import printable

    made = command.report(folder, output=output, samples_mb=samples_mb)
    for line in command.lines(made):
        print(printable(line, sys.stdout.encoding))
    if show:
        typer.launch(made.path.resolve().as_uri())


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
    except OSError as error:  # a full disk, a folder that cannot be written
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

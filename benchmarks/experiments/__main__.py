"""Command line: ``python -m benchmarks.experiments run SUITE ...``, ``... report`` and ``... baselines``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .store import RESULTS
from .suites import SUITES

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)


@app.command()
def run(
    suites: Annotated[list[str], typer.Argument(help=f"of {', '.join(SUITES)}; in this order")],
    results: Annotated[Path, typer.Option(help="folder of the result files")] = RESULTS,
    scheme: Annotated[list[str] | None, typer.Option(help="only this one; may be repeated")] = None,
    workers: Annotated[int, typer.Option(min=1, help="processes of one thread each")] = 1,
    seconds: Annotated[float | None, typer.Option(help="start no run after this long")] = None,
    same_rate: Annotated[bool, typer.Option("--same-rate", help="also every seed at the default's best rate")] = False,
) -> None:
    """Train the runs of SUITES that have no result yet; a killed run continues where it was."""
    from .run import run_suite

    if unknown := set(suites) - set(SUITES):
        raise typer.BadParameter(f"no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    for suite in suites:
        trained = run_suite(
            suite, folder=results, schemes=scheme, workers=workers, seconds=seconds, same_rate=same_rate
        )
        typer.echo(f"{suite}: {trained} runs")


@app.command()
def baselines(results: Annotated[Path, typer.Option(help="folder of the result files")] = RESULTS) -> None:
    """Measure what a table of frequencies reaches on each task, beside the results."""
    from .baselines import write

    typer.echo(write(results))


@app.command()
def report(results: Annotated[Path, typer.Option(help="folder of the result files")] = RESULTS) -> None:
    """Write tables and plots of all results beside them."""
    from .report import write_report

    typer.echo(write_report(results))


if __name__ == "__main__":
    app()

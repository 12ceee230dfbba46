"""Implements `tarry-spark audit`: its options, progress, and its report. `batch.audit.driver` does the audit."""

from __future__ import annotations

import functools
import random
from pathlib import Path
from typing import Final

import click
import msgspec
from rich import filesize
from rich.table import Table
from rich.text import Text

from batch.audit import driver
from batch.audit.findings import MEANING, Kind, Report, Severity
from batch.cli import options
from batch.cli.options import Shared
from batch.engine.job_settings import store_of
from batch.forecast.result import shown

SHOWN_MAX: Final = 50
"""Most findings shown to people; JSON has more."""

_STYLES: Final = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.INFO: "dim"}


@click.command()
@options.shared
@click.option(
    "--sample",
    type=click.FloatRange(0, 1),
    default=1.0,
    show_default=True,
    help="Part of the live buckets to read in full. Of the others, only table and entry 0 are read. "
    "Everything else is read in full.",
)
@click.option(
    "--output",
    "output_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write the report as JSON to this file.",
)
@click.pass_context
def audit(ctx: click.Context, shared: Shared, *, sample: float, output_file: Path | None) -> None:
    """Check everything in the store, while daemons serve from it; change nothing.

    The audit reads and decodes every object. It checks hashes and checksums, each object against the manifest that
    names it, and each manifest and log slot against the one before it. It finds missing objects. It lists objects that
    no manifest names, and searches for their rows elsewhere. With --topic it reads only manifests and objects of these
    topics.

    \b
    Exit status:
      0    no errors; there may be warnings
      1    errors were found; or the audit could not run, and a message says why in place of a report
      2    a wrong option or setting

    \b
    Examples:
      tarry-spark audit --config /etc/tarry/tarryd.toml --engine local
      tarry-spark audit --store s3://delays/root --json --sample 0.05
    """
    store, place = store_of(shared.settings), shared.settings.store
    request = driver.Request(
        store=place.path if place.kind == "local" else f"s3://{place.s3.bucket}/{place.s3.prefix}".rstrip("/"),
        limits=driver.Limits.of(shared.settings),
        topics=shared.topics,
        sample=sample,
        seed=random.SystemRandom().getrandbits(32),
    )
    try:
        with (
            shared.open_engine("audit", preload=[driver.__name__]) as engine,
            options.progress("audit", shown=not shared.quiet) as show,
        ):
            report = driver.audit(
                store,
                engine,
                request,
                open_store=functools.partial(store_of, shared.settings),
                progress=lambda what, done, total: show(done, total),
            )
    except driver.UnknownTopic as error:
        raise click.ClickException(str(error)) from error
    if output_file is not None:
        output_file.write_bytes(msgspec.json.format(msgspec.json.encode(report.as_json()), indent=2) + b"\n")
    if shared.as_json:
        options.print_json(report.as_json())
    else:
        _show(report)
    ctx.exit(1 if report.errors else 0)


def _show(report: Report) -> None:
    """Print the report for people."""
    to = options.results()
    tally = report.tally
    read = Table("object", "read", "bytes", title=f"{report.store}: {report.shards} shards, {report.topics} topics")
    for column in read.columns[1:]:
        column.justify = "right"
    for what, count in sorted(tally.objects.items()):
        read.add_row(what, f"{count:,}", filesize.decimal(tally.size_bytes[what]))
    to.print(read)
    if tally.kinds:
        counts = Table("severity", "kind", "count", "meaning")
        ranks = list(Severity), list(Kind)
        for kind, severity in sorted(tally.kinds, key=lambda each: (ranks[0].index(each[1]), ranks[1].index(each[0]))):
            style = _STYLES[severity]
            times = f"{tally.kinds[kind, severity]:,}"
            counts.add_row(Text(severity.value, style), kind.value, times, MEANING[kind])
        to.print(counts)
    found = report.in_order()
    for each in found[:SHOWN_MAX]:
        topic = f" topic {each.topic!r}" if each.topic else ""
        text = shown(f" {each.kind.value} {each.object}{topic}: {each.detail}")
        to.print(
            Text.assemble((each.severity.value, _STYLES[each.severity]), text),
            soft_wrap=True,
        )
    if len(found) > SHOWN_MAX:
        to.print(f"... and {len(found) - SHOWN_MAX:,} more: see --json or --output")
    totals = f"{tally.objects.total():,} objects, {filesize.decimal(tally.size_bytes.total())}, {tally.rows:,} rows"
    outcome = f"{report.errors:,} errors, {report.count(Severity.WARNING):,} warnings"
    to.print(f"{outcome}; read {totals} in {report.seconds:.1f} s ({report.engine})", soft_wrap=True)

"""Measures a daemon of its own.

    python -m benchmarks add|lateness [--store local|s3] [--set section.key=value ...] [--json]

Owns: the command line, and the daemon process on a temporary root. Does not own: the measurements, a module each.
The exit status says whether every row was accounted for; no figure fails.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from pathlib import Path

from benchmarks import add_rate, lateness, report
from examples import processes

MEASUREMENTS = {"add": add_rate, "lateness": lateness}
PATIENCE_S = 60.0


def main() -> int:
    arguments = _arguments()
    measurement = MEASUREMENTS[arguments.measurement]
    settings = measurement.SETTINGS | dict(each.split("=", 1) for each in arguments.set)
    with contextlib.ExitStack() as stack:
        directory = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tarry-benchmark-", dir=arguments.directory))
        )
        store: dict[str, object] = processes.local_store(directory / "root")
        if arguments.store == "s3":
            server = stack.enter_context(processes.S3ServerProcess("s3", directory))
            server.start()
            store = server.settings()
        daemon = stack.enter_context(processes.DaemonProcess("tarryd", directory, store | settings))
        daemon.start_serving(PATIENCE_S)
        try:
            measured, accounted_for = measurement.run(daemon, arguments)
        except Exception:
            print(daemon.failed("was being measured"), file=sys.stderr)
            raise
    where: dict[str, report.Value] = {"store": arguments.store, "settings": _text(settings)}
    report.Measurement(measured.name, {**where, **report.machine(), **measured.values}).show(as_json=arguments.json)
    return 0 if accounted_for else 1


def _text(settings: dict[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "defaults"


def _arguments() -> argparse.Namespace:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--store", choices=("local", "s3"), default="local", help="default: %(default)s")
    common.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of the daemon"
    )
    common.add_argument("--seed", type=int, default=195, help="default: %(default)s")
    common.add_argument("--json", action="store_true", help="print JSON")
    common.add_argument("--directory", type=Path, help="where the temporary root is made; the disk that is measured")
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measures a daemon of its own.")
    commands = parser.add_subparsers(dest="measurement", required=True)
    for name, module in MEASUREMENTS.items():
        module.add_arguments(commands.add_parser(name, parents=[common], help=(module.__doc__ or "").splitlines()[0]))
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

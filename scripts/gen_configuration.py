"""Writes docs/CONFIGURATION.md from the declared settings, and with `--check` tells whether it is what they say.

uv run scripts/gen_configuration.py [--check]
"""

from __future__ import annotations

import argparse
import inspect
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from daemon import config, settings  # noqa: E402 - the repository is put on the path first
from storage_backends import settings_file  # noqa: E402

TARGET = REPOSITORY / "docs" / "CONFIGURATION.md"

HEAD = """\
# Configuration

Made from `daemon/settings.py` and `storage_backends/storage_settings.py` by `scripts/gen_configuration.py`. Names in
`bucket` follow [PIP-195](https://github.com/apache/pulsar/blob/master/pip/pip-195.md), names in `deletion` follow
[PIP-186](https://github.com/apache/pulsar/blob/master/pip/pip-186.md). `redelivery.nack_precision_bits` is
`negativeAckPrecisionBitCnt` of [PIP-393](https://github.com/apache/pulsar/blob/master/pip/pip-393.md),
`redelivery.delay_levels` is RocketMQ's [`messageDelayLevel`](https://rocketmq.apache.org/docs/4.x/producer/04message3/).
Terms: [GLOSSARY.md](GLOSSARY.md).

`tarryd` needs no configuration: without arguments it serves on loopback and keeps its data in `./tarry-data`. A setting
comes from, in this order, the later wins:

1. its default,
2. the TOML file of `tarryd --config FILE`: a table for each section below,
3. the environment: `TARRY_SECTION__KEY`, such as `TARRY_STORE__PATH=/var/lib/tarry` or `TARRY_STORE__S3__BUCKET=x`,
4. `--set section.key=value`, repeatable.

An array of tables (`[[...]]` below) stands in the file only, once for each of its tables.

An unknown setting, a value out of its range or settings that contradict each other are an error (exit status 2) that
names the setting. `tarryd --check` validates the configuration, tries out what the store promises, and ends.
A variable that begins with `TARRY_` and has no `__` in its name is not a setting and is left alone.
"""


def render() -> str:
    parts = [HEAD]
    for name, section in sections(config.Config, ""):
        parts.append(
            f"\n## `{name}`\n\n{inspect.getdoc(section)}\n\n"
            "| setting | default | allowed | meaning |\n|---|---|---|---|\n"
        )
        parts += [row(field) for field in msgspec.structs.fields(section) if not is_own_section(field.type)]
    return "".join(parts)


def sections(section: type[msgspec.Struct], path: str) -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Names, as headings, and sections; an array of tables has its name in two brackets, as in TOML."""
    for field in msgspec.structs.fields(section):
        name = f"{path}{field.name}"
        table = settings_file.table_of(field.type)
        if is_section(field.type):
            yield name, field.type
            yield from sections(field.type, f"{name}.")
        elif table is not None:
            yield f"[[{name}]]", table
            yield from sections(table, f"{name}.")


def is_own_section(declared: Any) -> bool:
    """Whether it has a heading of its own."""
    return is_section(declared) or settings_file.table_of(declared) is not None


def is_section(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, msgspec.Struct)


def row(field: msgspec.structs.FieldInfo) -> str:
    base, meta = declared_as(field.type)
    meaning = str(meta.description).replace("|", "\\|")
    default = "" if field.default in (None, msgspec.NODEFAULT) else f"`{shown(field.default)}`"
    return f"| `{field.name}` | {default} | {allowed(base, meta)} | {meaning} |\n"


def declared_as(declared: Any) -> tuple[Any, msgspec.Meta]:
    """The type and what is said about it, of `Annotated[type, Meta]` or that or None."""
    for each in (declared, *typing.get_args(declared)):
        if typing.get_origin(each) is typing.Annotated:
            base, meta = typing.get_args(each)
            return base, meta
    raise TypeError(f"{declared} has no description")


def allowed(base: Any, meta: msgspec.Meta) -> str:
    if typing.get_origin(base) is typing.Literal:
        return ", ".join(f"`{shown(value)}`" for value in typing.get_args(base))
    if base is bool:
        return "`true`, `false`"
    if meta.pattern == settings.ADDRESS:
        return "host:port"
    if meta.pattern == settings.URL:
        return "URL, http or https"
    if base is str:
        return "text"
    if typing.get_origin(base) is tuple:
        return "array of texts"
    bounds = [
        f"{sign} {shown(value)}"
        for sign, value in ((">", meta.gt), ("≥", meta.ge), ("≤", meta.le))
        if value is not None
    ]
    return " and ".join(bounds)


def shown(value: Any) -> str:
    """As in TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(shown, value))}]"
    return (
        f"{value:_}"
        if isinstance(value, int) and value >= 100_000
        else f"{value:g}"
        if isinstance(value, float)
        else str(value)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/CONFIGURATION.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if it is not what the settings say")
    wanted = render()
    if parser.parse_args().check:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != wanted:
            print(
                f"{TARGET.relative_to(REPOSITORY)}: not what the settings say; run {Path(__file__).name}",
                file=sys.stderr,
            )
            return 1
        return 0
    TARGET.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

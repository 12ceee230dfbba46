"""Reads settings from a TOML file, then `TARRY_SECTION__KEY` variables, then `section.key=value` overrides.

The later wins. Reading is strict: an unknown key or a value out of its range is an error that names the setting and
where it was set. Other modules declare the settings and check which contradict each other.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from storage_backends.storage_settings import WRITTEN_AS, SettingsError

ENVIRONMENT_PREFIX = "TARRY_"

Settings = TypeVar("Settings", bound=msgspec.Struct)


def load(
    settings: type[Settings],
    path: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Sequence[str] = (),
    others: bool = False,
) -> Settings:
    """Read the file, the environment and `section.key=value` overrides into `settings`.

    If `path` is None, the defaults apply; if `environment` is None, the process's is read. With `others`, sections of
    file and environment that `settings` does not have belong to another program and are ignored. Raises SettingsError,
    which names the setting's path and where it was set.
    """
    sections = _fields(settings)
    data: dict[str, Any] = {} if path is None else _read(path)
    if others:
        data = {name: value for name, value in data.items() if name in sections}
    _refuse_unknown_keys(data, settings, path=())
    for source, keys, text in _of_environment(os.environ if environment is None else environment):
        if not others or keys[0] in sections:
            _set(data, settings, source, keys, text)
    for source, keys, text in _of_overrides(overrides):
        _set(data, settings, source, keys, text)
    try:
        return msgspec.convert(data, settings)
    except msgspec.ValidationError as error:
        raise SettingsError(_explain(error, data, settings)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error


def _fields(section: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}


def _is_section(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, msgspec.Struct)


def table_of(declared: Any) -> type[msgspec.Struct] | None:
    """Return the section of which the setting is an array, or None if it is no array."""
    if typing.get_origin(declared) is not tuple:
        return None
    item = typing.get_args(declared)[0]
    return item if _is_section(item) else None


def _unknown(keys: Iterable[str], known: Iterable[str], source: str = "") -> SettingsError:
    *parents, name = keys
    nearest = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {'.'.join([*parents, nearest[0]])}?" if nearest else ""
    return SettingsError(f"{'.'.join(keys)}{source} is not a setting{hint}")


def _refuse_unknown_keys(data: Mapping[str, Any], section: type[msgspec.Struct], path: tuple[str, ...]) -> None:
    fields = _fields(section)
    for name, value in data.items():
        if name not in fields:
            raise _unknown((*path, name), fields)
        if _is_section(fields[name]):
            if not isinstance(value, dict):
                raise SettingsError(f"{'.'.join((*path, name))} is a section, not a setting")
            _refuse_unknown_keys(value, fields[name], (*path, name))
        table = table_of(fields[name])
        if table is not None:
            if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
                where = ".".join((*path, name))
                raise SettingsError(f"{where} is an array of tables: [[{where}]]")
            for index, item in enumerate(value):
                _refuse_unknown_keys(item, table, (*path, f"{name}[{index}]"))


def _of_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, tuple[str, ...], str]]:
    """Yield source (for messages), path and text of each override."""
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX) and "__" in name:
            keys = name.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            yield f" (from {name})", tuple(keys), environment[name]


def _of_overrides(overrides: Sequence[str]) -> Iterable[tuple[str, tuple[str, ...], str]]:
    """Yield source (for messages), path and text of each override `section.key=value`. Raises SettingsError."""
    for override in overrides:
        left, equals, text = override.partition("=")
        if not equals or not left.strip():
            raise SettingsError(f"--set {override} is not section.key=value")
        yield f" (from --set {override})", tuple(left.strip().split(".")), text


def _set(data: dict[str, Any], settings: type[msgspec.Struct], source: str, keys: tuple[str, ...], text: str) -> None:
    """Write one override into `data`, as the type that the setting has."""
    section = settings
    for depth, name in enumerate(keys):
        fields = _fields(section)
        if name not in fields:
            raise _unknown(keys[: depth + 1], fields, source)
        if table_of(fields[name]) is not None:
            raise SettingsError(
                f"{'.'.join(keys[: depth + 1])}{source} is an array of tables, which only the file sets"
            )
        last = depth == len(keys) - 1
        if _is_section(fields[name]) == last:
            kind = "a section, not a setting" if last else "a setting, not a section"
            raise SettingsError(f"{'.'.join(keys[: depth + 1])}{source} is {kind}")
        if last:
            try:
                data[name] = msgspec.convert(text, fields[name], strict=False)
            except msgspec.ValidationError as error:
                why = _plainly(str(error).partition(" - at `$")[0], fields[name])
                raise SettingsError(f"{'.'.join(keys)}{source} is {text!r}; {why}") from error
        else:
            data = data.setdefault(name, {})
            section = fields[name]


def _explain(error: msgspec.ValidationError, data: dict[str, Any], settings: type[msgspec.Struct]) -> str:
    """Turn a message of msgspec into one that begins with setting and value.

    msgspec says `Expected ... - at `$.journal.slot_bytes_max``.
    """
    what, _, where = str(error).partition(" - at `$.")
    value: Any = data
    declared: Any = settings
    for key, index in re.findall(r"([^.\[\]`]+)|\[(\d+)\]", where):
        if isinstance(value, dict):
            value = value.get(key)
        elif isinstance(value, list) and index:
            value = value[int(index)]
        declared = _below(declared, key)
    return f"{where.rstrip('`')} is {value!r}; {_plainly(what, declared)}"


def _below(declared: Any, key: str) -> Any:
    """Return the type of the value under a key; for an array, with an empty key, that of its items."""
    if _is_section(declared):
        return _fields(declared).get(key)
    if typing.get_origin(declared) is tuple:
        return typing.get_args(declared)[0]
    # An annotated or an optional type
    inner = [each for each in typing.get_args(declared) if not isinstance(each, msgspec.Meta)]
    return _below(inner[0], key) if inner else None


_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
}


def _plainly(what: str, declared: Any) -> str:
    """Say in plain words what is allowed, if msgspec names types and patterns."""
    choices = _choices(declared)
    if what.startswith("Invalid enum value") and choices:
        return f"it must be {' or '.join(choices)}"
    missing = re.fullmatch("Object missing required field `(.*)`", what)
    if missing is not None:
        return f"{missing[1]} is not set"
    expected = re.match(r"Expected `([a-z]+)[^`]*`(.*)", what)
    if expected is None or expected[1] not in _KINDS:
        return what
    limit = expected[2].partition(", got ")[0]
    if "matching regex" in limit:
        return f"it must be {_allowed(declared)}"
    return f"it must be {_KINDS[expected[1]]}{limit}"


def _choices(declared: Any) -> list[str]:
    """Return the values of a setting that has a few to choose from."""
    inner = typing.get_args(declared)
    if typing.get_origin(declared) is typing.Literal:
        return [str(each) for each in inner]
    return [choice for each in inner for choice in _choices(each)]


def _allowed(declared: Any) -> str:
    """Return the words of the declaration for a pattern (`storage_settings.WRITTEN_AS`)."""
    for each in typing.get_args(declared):
        if isinstance(each, msgspec.Meta) and each.extra and WRITTEN_AS in each.extra:
            return str(each.extra[WRITTEN_AS])
        found = _allowed(each)
        if found:
            return found
    return ""

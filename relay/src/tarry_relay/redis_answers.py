"""Interprets the errors of Redis and of its client.

Its one importer is `redis_broker`; it stands alone so that its tables are tested against a server's real answers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

import redis

from tarry_relay import port
from tarry_relay.port import Cause, Meaning, Meant

TOO_LARGE: Final = "TOOLARGE"
EXHAUSTED: Final = "EXHAUSTED"
WATCHED: Final = "WATCH"
NO_FIELDS: Final = "NOFIELDS"

_REFUSED = Meant(Meaning.REFUSED)
_NOT_NOW = Meant(Meaning.NOT_NOW)
_LIMIT = Meant(Meaning.NOT_NOW, Cause.LIMIT)

ANSWERS: Mapping[str, Meant] = {
    # Space and permissions
    "OOM": _LIMIT,
    "MISCONF": _LIMIT,
    "NOREPLICAS": _LIMIT,
    "NOPERM": _LIMIT,
    # The key was replaced by one of another kind, which may be removed again.
    "WRONGTYPE": _NOT_NOW,
    # The last id of the stream is the greatest possible: it takes nothing until it is created again.
    EXHAUSTED: _NOT_NOW,
    # The server starts, is a replica, or is busy; or a cluster moves keys.
    "ASK": _NOT_NOW,
    "BUSY": _NOT_NOW,
    "CLUSTERDOWN": _NOT_NOW,
    "CROSSSLOT": _NOT_NOW,
    "LOADING": _NOT_NOW,
    "MASTERDOWN": _NOT_NOW,
    "MOVED": _NOT_NOW,
    "READONLY": _NOT_NOW,
    "TRYAGAIN": _NOT_NOW,
    # Nothing was done.
    "EXECABORT": _NOT_NOW,
    "NOSCRIPT": _NOT_NOW,
    WATCHED: _NOT_NOW,
    # The message itself
    TOO_LARGE: _REFUSED,
    NO_FIELDS: _REFUSED,
}
"""Known answers to a publish, by code: the first word of an error, or a name of our own for a text without one"""

_CODES_OF_TEXTS = {
    "Elements are too large to be stored": TOO_LARGE,
    "Protocol error: invalid bulk length": TOO_LARGE,
    "Protocol error: invalid multibulk length": TOO_LARGE,
    "The ID specified in XADD is equal or smaller": EXHAUSTED,
    "The stream has exhausted the last possible ID": EXHAUSTED,
    # Redis 6.2 reports it this way inside scripts, without a code.
    "The user executing the script can't": "NOPERM",
    "Watched variable changed": WATCHED,
    "Wrong number of args calling Redis command": NO_FIELDS,
    "no such key": "NOKEY",
}
_CODES_OF_CLASSES: Mapping[type[Exception], str] = {
    redis.exceptions.AskError: "ASK",
    redis.exceptions.BusyLoadingError: "LOADING",
    redis.exceptions.ClusterCrossSlotError: "CROSSSLOT",
    redis.exceptions.ClusterDownError: "CLUSTERDOWN",
    redis.exceptions.ExecAbortError: "EXECABORT",
    redis.exceptions.MasterDownError: "MASTERDOWN",
    redis.exceptions.MovedError: "MOVED",
    redis.exceptions.NoPermissionError: "NOPERM",
    redis.exceptions.NoScriptError: "NOSCRIPT",
    redis.exceptions.OutOfMemoryError: "OOM",
    redis.exceptions.ReadOnlyError: "READONLY",
    redis.exceptions.TryAgainError: "TRYAGAIN",
}
"""Codes that the client cuts from the text of an error"""
_PASSING = {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MISCONF", "NOREPLICAS", "NOSCRIPT", "OOM", "READONLY"}
_PASSING |= {"TRYAGAIN"}
_LOG_IS_GONE = {"NOGROUP", "NOKEY", "UNBLOCKED", "WRONGTYPE"}
_WHO_WE_ARE = {"NOAUTH", "NOPERM", "WRONGPASS"}
# Before Redis 7, the text of a script's error follows one or two of these.
_SCRIPT = re.compile(r"(ERR )?(Error running script \(call to \w+\): )?(@user_script: ?\d+: )*-?(ERR )?")
# The client puts this before an error in a transaction, with the beginning of the command.
_PIPELINE = re.compile(r"Command # \d+ .* of pipeline caused error: \(['\"](.*)['\"],\)", re.DOTALL)
_CODE = re.compile(r"[A-Z]{2,}\b")


def text_of(error: Exception) -> str:
    """Return the text of an error, without the prefixes of script and client."""
    text = str(error)
    if in_pipeline := _PIPELINE.fullmatch(text):
        text = in_pipeline[1]
    return _SCRIPT.sub("", text, count=1) or type(error).__name__


def code_of(error: Exception) -> str:
    """Return the code of an error of Redis, or the class of another exception."""
    if code := _CODES_OF_CLASSES.get(type(error)):
        return code
    text = text_of(error)
    for beginning, code in _CODES_OF_TEXTS.items():
        if text.startswith(beginning):
            return code
    if not isinstance(error, redis.ResponseError):
        return type(error).__name__
    word = _CODE.match(text)
    return word[0] if word else "ERR"


def produced(target: str, error: Exception) -> port.Produced:
    """Return what an error means for the single message that was published."""
    code = code_of(error)
    return port.Produced(ANSWERS.get(code, Meant(Meaning.UNKNOWN)), code, f"{target}: {text_of(error)}")


def failure_of(what: str, error: Exception) -> Exception | None:
    """Return the port's failure for an error of another call, or None if it is a surprise.

    `what` names the request, for people.
    """
    code = code_of(error)
    text = f"{what}: {text_of(error)}"
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError) or code in _WHO_WE_ARE:
        return port.SessionOver(text)
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError) or code in _PASSING:
        return port.Unreachable(text)
    return port.NotThere(text) if code in _LOG_IS_GONE else None


@contextlib.contextmanager
def failures(what: str) -> Iterator[None]:
    """Turn errors of Redis into the failures of the port. A surprise stays as it is."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        if (failure := failure_of(what, error)) is None:
            raise
        raise failure from error

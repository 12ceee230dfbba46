"""The port: what an owned shard asks of the log in which its sections are written.

Owns: the questions. Does not own: the log (`daemon.owner.living_log`).
"""

from __future__ import annotations

from typing import Protocol

from daemon.group_commit.confirmation import Confirmation
from daemon.group_commit.slot_sender import SlotSender
from storage_backends.formats.manifest import ShardManifest
from storage_backends.slot_log import SlotLogs


class LogOfShards(Protocol):
    """The log of this daemon. `sender` takes what is staged; `confirmation` is of the log, and so of every shard."""

    @property
    def log_id(self) -> str: ...

    @property
    def sender(self) -> SlotSender: ...

    @property
    def confirmation(self) -> Confirmation: ...

    @property
    def logs(self) -> SlotLogs:
        """The logs of the root, this one among them."""
        ...

    @property
    def bytes_written(self) -> int:
        """Bytes of its slots so far."""
        ...

    @property
    def work_written(self) -> int:
        """What a restart would have to do to read it from its beginning: a unit for each slot and each section."""
        ...

    def learned(self, manifest: ShardManifest) -> None:
        """A manifest of a shard of the log is committed: slots of the log may not be needed any more."""
        ...

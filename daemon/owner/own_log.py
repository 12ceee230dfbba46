"""The log that this daemon writes: its next number, how far it goes for each shard, and the slot under way.

Owns: what goes into the next slot, with which shard slots (L1, L6), and how far the log is certain.
Does not own: sending a slot and finding out what became of it (`slot_outcome`, `log_writer`), deleting
(`log_truncation`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeAlias

from daemon.errors import InvariantViolated
from daemon.shard.range_operations import OwnLogEnd
from storage_backends.formats import log_slot_format
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, SlotIdentity, Writer

Encode: TypeAlias = Callable[[Head], bytes]
"""Gives the section of a shard, for the epoch and shard slot that it gets."""

_NOTHING: Mapping[int, bytes] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FrozenSlot:
    """A log slot as it is sent, the same at each try. `section_bytes`: by shard with a section, how long that is."""

    header: LogSlotHeader
    body: bytes
    section_bytes: Mapping[int, int]

    @property
    def number(self) -> int:
        return self.header.number

    @property
    def identity(self) -> SlotIdentity:
        return log_slot_format.identity_of(self.body)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Frozen:
    """What became of a filling. `slot`: None when no section could be encoded. `unencodable`: by shard, why its section
    could not: what its memory holds can never be stored.
    """

    slot: FrozenSlot | None
    unencodable: Mapping[int, Exception]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SlotDraft:
    """The next slot before its bytes are fixed: which sections it is to have, and with which shard slots."""

    header: LogSlotHeader
    sections: Mapping[int, tuple[Head, Encode]]

    def freeze(self) -> Frozen:
        """Encodes the slot. Takes its time, and may run in any thread."""
        bodies: dict[int, bytes] = {}
        unencodable: dict[int, Exception] = {}
        for shard, (head, encode) in self.sections.items():
            try:
                bodies[shard] = encode(head)
            except Exception as error:  # noqa: BLE001 - whatever it is costs its shard alone
                unencodable[shard] = error
        if unencodable and not bodies:
            return Frozen(None, unencodable)
        given = {shard: self.sections[shard][0] for shard in bodies}
        header = dataclasses.replace(self.header, heads={**self.header.heads, **given})
        body = log_slot_format.encode_log_slot(header, bodies or _NOTHING)
        return Frozen(FrozenSlot(header, body, {shard: len(section) for shard, section in bodies.items()}), unencodable)


class LogCursor:
    """One incarnation's log, from OPEN on. Used in one thread.

    A log that has lost a number to a fence, or was closed, is never used again: the daemon comes back with another one.
    """

    def __init__(self, log_id: str, owner: Writer) -> None:
        self._log_id = log_id
        self._owner = owner
        self._certain = 0
        self._heads: Mapping[int, Head] = {}
        # By shard that may have sections: the epoch, and the last shard slot that is stored or was at the claim.
        self._staging: dict[int, Head] = {}
        self._under_way: SlotDraft | None = None
        self._slot: FrozenSlot | None = None
        self._closed = False

    @property
    def log_id(self) -> str:
        return self._log_id

    @property
    def last_certain(self) -> int:
        """0 before OPEN is certain."""
        return self._certain

    @property
    def rests(self) -> bool:
        """Whether every slot that was begun is certain."""
        return self._under_way is None

    def end(self) -> OwnLogEnd:
        """How far the log goes. Raises InvariantViolated while a slot is under way: it may go further."""
        self._check_rests("its end is asked for")
        return OwnLogEnd(log_id=self._log_id, end=self._certain, heads=self._heads)

    def head(self, shard: int) -> Head | None:
        """How far the log certainly goes for the shard; None when it never had a section of it."""
        return self._heads.get(shard)

    def has_under_way(self, shard: int) -> bool:
        """Whether a section of the shard is in the slot that was begun."""
        return self._under_way is not None and shard in self._under_way.sections

    def stages(self, shard: int) -> bool:
        """Whether the shard may have sections now."""
        return shard in self._staging

    def begin(self, shard: int, claimed: Head) -> None:
        """The claim of a shard is certain: it may have sections of that epoch, behind that shard slot."""
        if self._certain == 0:
            raise InvariantViolated(f"log {self._log_id}: shard {shard} was claimed before OPEN was certain")
        before = self._staging.get(shard)
        if before is not None:
            raise InvariantViolated(
                f"shard {shard}: epoch {claimed.epoch} begins, epoch {before.epoch} was not stopped"
            )
        self._staging[shard] = claimed

    def stop(self, shard: int) -> Head:
        """The shard has no sections from now on, as it is about to be released, given back or claimed anew; its epoch
        and its last shard slot. Raises InvariantViolated while a section of it is under way.
        """
        if self._under_way is not None and self.has_under_way(shard):
            number = self._under_way.header.number
            raise InvariantViolated(f"shard {shard} stops while its section in slot {number} is not certain")
        return self._staging.pop(shard)

    def open(self) -> SlotDraft:
        """OPEN, the first slot."""
        return self._begin_slot(LogSlotKind.OPEN, {})

    def close(self) -> SlotDraft:
        """CLOSE, the last slot. Nothing is handed out any more."""
        filling = self._begin_slot(LogSlotKind.CLOSE, {})
        self._closed = True
        return filling

    def fill(self, sections: Mapping[int, Encode]) -> SlotDraft:
        """DATA with a section of each of these shards, which gets its next shard slot."""
        unknown = sorted(sections.keys() - self._staging.keys())
        if unknown or not sections:
            raise InvariantViolated(
                f"log {self._log_id}: shards {unknown} stage before their claim or after their stop"
            )
        return self._begin_slot(LogSlotKind.DATA, sections)

    def frozen(self, slot: FrozenSlot | None) -> None:
        """The bytes of the slot that was begun are fixed; None: no section could be encoded, and none is sent."""
        if self._under_way is None or self._slot is not None:
            raise InvariantViolated(f"log {self._log_id}: a slot is frozen that was not begun")
        self._slot = slot
        if slot is None:
            self._under_way = None

    def certain(self) -> None:
        """The slot that was frozen is certain."""
        slot = self._slot
        if slot is None:
            raise InvariantViolated(f"log {self._log_id}: no slot is under way")
        self._under_way = self._slot = None
        self._certain = slot.number
        self._heads = slot.header.heads
        self._staging.update((shard, slot.header.heads[shard]) for shard in slot.section_bytes)

    def _begin_slot(self, kind: LogSlotKind, sections: Mapping[int, Encode]) -> SlotDraft:
        self._check_rests(f"{kind.name} begins")
        if self._closed or (kind is LogSlotKind.OPEN) != (self._certain == 0):
            raise InvariantViolated(f"log {self._log_id}: {kind.name} begins behind slot {self._certain}")
        header = LogSlotHeader(
            log_id=self._log_id,
            number=self._certain + 1,
            kind=kind,
            heads=self._heads,
            writer=self._owner if kind is LogSlotKind.OPEN else None,
        )
        before = self._staging
        next_heads = {shard: Head(before[shard].epoch, before[shard].last_slot + 1) for shard in sections}
        self._under_way = SlotDraft(header, {shard: (next_heads[shard], encode) for shard, encode in sections.items()})
        return self._under_way

    def _check_rests(self, what: str) -> None:
        if self._under_way is not None:
            number = self._under_way.header.number
            raise InvariantViolated(f"log {self._log_id}: {what} while slot {number} is not certain")

"""Objects that a writer with a bug would write: whole by their checksums, and with a text that is not UTF-8."""

from __future__ import annotations

from storage_backends.formats import framing, names
from storage_backends.object_store import ObjectStore


def with_bad_text(framed: bytes, text: bytes) -> bytes:
    """The object with a byte of the text that is not UTF-8, and the right checksum."""
    payload = framed[framing.HEADER_BYTES : -4]
    place = payload.index(text)
    return framing.frame(framed[:4], 1, payload[:place] + b"\xff" + payload[place + 1 :])


def put_bad_successor(store: ObjectStore, prefix: str, text: str) -> str:
    """The next manifest, as a writer with a bug would write it; its key."""
    newest = max(each.key for each in store.list(prefix))
    key = names.numbered_key(prefix, names.number_of(newest) + 1)
    store.put(key, with_bad_text(store.get(newest), text.encode()))
    return key

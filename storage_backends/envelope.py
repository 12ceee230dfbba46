"""What stands in front of the body in a file of a local directory.

Owns: the form of the envelope, and the check that a file is as it was written.
Does not own: files.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final

import google_crc32c

from storage_backends.object_store import METADATA_BYTES_MAX, Damaged, StoreRefused

ENVELOPE_BYTES_MAX: Final = 64 + 3 * METADATA_BYTES_MAX
"""No envelope is longer: its fixed fields, and metadata with two separators for every two bytes or more."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What stands in front of the body. `size_bytes`: of the envelope itself.

    Form (little-endian): magic `TARRYOBJ`, u16 version, u16 length of the metadata, u32 CRC32C of the body, u64 length
    of the body, u32 CRC32C of all of the envelope but this field; then the metadata, a line `key=value` each.
    """

    metadata: Mapping[str, str]
    body_bytes: int
    body_crc32c: int
    size_bytes: int

    MAGIC: ClassVar = b"TARRYOBJ"
    VERSION: ClassVar = 1
    FIXED: ClassVar = struct.Struct("<8sHHIQ")
    CHECKSUM: ClassVar = struct.Struct("<I")

    @classmethod
    def encode(cls, body: bytes, metadata: Mapping[str, str]) -> bytes:
        """The envelope of this body."""
        lines = "".join(f"{name}={value}\n" for name, value in metadata.items()).encode("ascii")
        fixed = cls.FIXED.pack(cls.MAGIC, cls.VERSION, len(lines), google_crc32c.value(body), len(body))
        return fixed + cls.CHECKSUM.pack(google_crc32c.value(fixed + lines)) + lines

    @classmethod
    def decode(cls, front: bytes, file_bytes: int, key: str, path: Path) -> Envelope:
        """The envelope of a file of `file_bytes`. Raises `Damaged`, also when the file should have another length."""
        head_bytes = cls.FIXED.size + cls.CHECKSUM.size
        if len(front) < head_bytes or not front.startswith(cls.MAGIC):
            raise Damaged(key, f"{path} is damaged at byte 0: it does not begin with an envelope")
        _, version, metadata_bytes, body_crc32c, body_bytes = cls.FIXED.unpack_from(front)
        (checksum,) = cls.CHECKSUM.unpack_from(front, cls.FIXED.size)
        size_bytes = head_bytes + metadata_bytes
        lines = front[head_bytes:size_bytes]
        if google_crc32c.value(front[: cls.FIXED.size] + lines) != checksum:
            raise Damaged(key, f"{path} is damaged at byte 0: the CRC32C of the envelope differs")
        if version != cls.VERSION:
            raise StoreRefused(key, f"{path} has envelope version {version}; this release reads version {cls.VERSION}")
        written_bytes = size_bytes + body_bytes
        if file_bytes != written_bytes:
            where = min(file_bytes, written_bytes)
            raise Damaged(key, f"{path} is damaged at byte {where}: it has {file_bytes} bytes of {written_bytes}")
        metadata = dict(line.split("=", 1) for line in lines.decode("ascii").splitlines())
        return cls(MappingProxyType(metadata), body_bytes, body_crc32c, size_bytes)

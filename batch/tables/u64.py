"""Orders, shows and makes unsigned 64-bit numbers in Spark, which has none: they are bits in a `bigint`.

rows.orderBy(u64.unsigned_order("ledger_id"), u64.unsigned_order("entry_id"))
rows.where(rows.ledger_id == u64.literal(18_446_744_073_709_551_615))
rows.select(u64.decimal("entry_id"), u64.hexadecimal("entry_id"))
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F

_BITS: Final = 64
_SIGN: Final = 1 << (_BITS - 1)
_MAX: Final = (1 << _BITS) - 1


def unsigned_order(column: Column | str) -> Column:
    """Return a number that orders as the u64 does, to sort by and to compare with that of another column."""
    return _column(column).bitwiseXOR(F.lit(-_SIGN).cast("bigint"))


def decimal(column: Column | str) -> Column:
    """Return the number as `decimal(20,0)`."""
    signed = _column(column)
    wide = signed.cast("decimal(20,0)")
    beyond = F.lit(str(_MAX + 1)).cast("decimal(20,0)")
    return F.when(signed < 0, (wide + beyond).cast("decimal(20,0)")).otherwise(wide)


def hexadecimal(column: Column | str) -> Column:
    """Return the number as 16 hexadecimal digits, which order as it does."""
    return F.lpad(F.lower(F.hex(_column(column))), 16, "0")


def literal(value: int) -> Column:
    """Return the `bigint` with the bits of a number. Raises ValueError unless it is a u64."""
    if not 0 <= value <= _MAX:
        raise ValueError(f"{value} is not between 0 and 2^64 - 1")
    return F.lit(value - (1 << _BITS) if value >= _SIGN else value).cast("bigint")


def _column(column: Column | str) -> Column:
    return F.col(column) if isinstance(column, str) else column

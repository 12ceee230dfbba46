"""Moves due members of a sorted set to a stream, by a script, again and again.

    python -m benchmarks.sorted_set_worker redis://127.0.0.1:6379

It stands apart because it is a program. `redis_carriers` adds and reads.
"""

from __future__ import annotations

import sys
import time

import redis

from benchmarks import load

WAITING, DUE = "waiting", "due"
AT_ONCE = 1_000
POLL_S = 0.01
MOVE = """
local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(due) do redis.call('XADD', KEYS[2], '*', 'message', member) end
if #due > 0 then redis.call('ZREM', KEYS[1], unpack(due)) end
return #due
"""


def main() -> None:
    broker = redis.Redis.from_url(sys.argv[1])
    move = broker.register_script(MOVE)
    while True:
        try:
            moved = move([WAITING, DUE], [load.now_ms(), AT_ONCE])
        except (redis.RedisError, OSError):
            moved = 0
        if not moved:
            time.sleep(POLL_S)


if __name__ == "__main__":
    main()

"""A real Kafka for tests of its adapter: a server with rights and a second port, topics of one test, and a session.

The plain port is for the test, who may do everything; the safe port, with TLS and SASL, is for relays whose rights a
test takes away.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka as kafka
import trustme
from confluent_kafka import admin
from cryptography.hazmat.primitives import serialization

from tarry_relay import kafka_broker, kafka_client, port, relay_settings
from tests.brokers import kafka_server

LIMIT_S = 300.0
_RIGHTS = """
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
allow.everyone.if.no.acl.found=true
super.users=User:ANONYMOUS
transaction.abort.timed.out.transaction.cleanup.interval.ms=200
"""
_admin: Any = admin
USER = f"User:{kafka_server.USER}"


def server_of(jars: Path, directory: Path, ca: trustme.CA) -> kafka_server.KafkaServer:
    """Return a server that is not started."""
    identity = directory / "identity.pem"
    issued = ca.issue_cert("127.0.0.1")
    key = serialization.load_pem_private_key(issued.private_key_pem.bytes(), None)
    plain = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
    identity.write_bytes(key.private_bytes(*plain) + chain)
    ca.cert_pem.write_to_path(directory / "ca.pem")
    (directory / "password").write_text(f"{kafka_server.PASSWORD}\n")
    return kafka_server.KafkaServer(jars, directory, identity, _RIGHTS)


def safe(directory: Path, password: Path | None = None) -> str:
    """Return what the file says of a broker that is reached by the safe port of a server in this directory."""
    file = password or directory / "password"
    return f', sasl = "PLAIN", user = "{kafka_server.USER}", password_file = "{file}", ca_file = "{directory}/ca.pem"'


class Topics:
    """The topics of one test, named after it."""

    def __init__(self, server: kafka_server.KafkaServer, name: str, directory: Path) -> None:
        self.server = server
        self.source, self.due = f"{name}-orders", f"{name}-due"
        self._directory = directory
        self._shared: dict[str, Any] = {"bootstrap.servers": server.url, "log_level": 2}
        self._producer = kafka.Producer(self._shared)
        server.make_topic(self.source, 3)
        server.make_topic(self.due)

    def settings(self, identity: str, broker: str, url: str, more: str, relay: str = "") -> relay_settings.Settings:
        """Return the settings of a relay. `broker` and `relay` are more of these tables, `more` are other ones."""
        file = self._directory / f"{identity}.toml"
        usual = "".join(
            f", {each}" for each in ("timeout_s = 10", "session_s = 2") if each.partition(" ")[0] not in broker
        )
        file.write_text(f"""
relay = {{ {relay or 'topic = "orders"'}, id = "{identity}" }}
source = {{ name = "{self.source}", dead_letters = "{self.due}" }}
targets = [{{ name = "{self.due}" }}]
broker = {{ kind = "kafka", url = "{url}", kept_bytes = 0 {usual} {broker} }}
{more}
""")
        return relay_settings.load(file)

    @contextlib.asynccontextmanager
    async def opened(
        self, identity: str = "one", broker: str = "", url: str = "", more: str = "", relay: str = ""
    ) -> AsyncIterator[kafka_broker.KafkaBroker]:
        """Open a session of a relay."""
        settings = self.settings(identity, broker, url or self.server.url, more, relay)
        assert isinstance(settings.broker, relay_settings.Kafka)
        async with kafka_broker.opened(settings, settings.broker) as opened:
            yield opened

    def make(self, suffix: str, settings: Mapping[str, str] | None = None) -> str:
        """Make one more topic, and return its name."""
        self.server.make_topic(f"{self.due}-{suffix}", 1, settings)
        return f"{self.due}-{suffix}"

    def publish(self, partition: int, rows: int, topic: str = "") -> None:
        """Publish numbers to a partition of the source, or of another topic."""
        for row in range(rows):
            self._producer.produce(topic or self.source, b"%d" % row, partition=partition)
        assert self._producer.flush(LIMIT_S) == 0

    def learn(self) -> None:
        """Publish with a new producer: an old one learns of partitions now and then."""
        self._producer = kafka.Producer(self._shared)

    def published(self, isolation: str = "read_committed", topic: str = "") -> list[bytes]:
        """Return what stands in the target, to its end."""
        consumer = kafka.Consumer(
            {**self._shared, "group.id": "tests", "enable.partition.eof": True, "isolation.level": isolation}
        )
        consumer.assign([kafka.TopicPartition(topic or self.due, 0, 0)])
        found = []
        while (message := consumer.poll(LIMIT_S)) is not None and message.error() is None:
            found.append(message.value() or b"")
        consumer.close()
        assert message is not None
        return found

    def wait_until_nothing_is_open(self) -> None:
        """Return when no transaction holds the target back."""
        ends = []
        for isolation in ("read_uncommitted", "read_committed"):
            ends.append(kafka.Consumer({**self._shared, "group.id": "tests", "isolation.level": isolation}))
        partition, deadline_s = kafka.TopicPartition(self.due, 0), time.monotonic() + LIMIT_S
        while len({each.get_watermark_offsets(partition, timeout=LIMIT_S) for each in ends}) > 1:
            assert time.monotonic() < deadline_s
        for each in ends:
            each.close()

    @contextlib.contextmanager
    def denied(self, kind: str, name: str, right: str) -> Iterator[None]:
        """Take one right away from the user of the safe port, and leave it the others."""
        where = _admin.ResourceType[kind], name, _admin.ResourcePatternType.LITERAL, USER, "*"
        rules = [
            (*where, _admin.AclOperation[right], _admin.AclPermissionType.DENY),
            # Once there is a rule about a name, each right needs one.
            (*where, _admin.AclOperation.ALL, _admin.AclPermissionType.ALLOW),
        ]
        for made in self.server.admin.create_acls([_admin.AclBinding(*each) for each in rules]).values():
            made.result()
        try:
            yield
        finally:
            for gone in self.server.admin.delete_acls([_admin.AclBindingFilter(*each) for each in rules]).values():
                gone.result()


async def read_all(reader: port.Reader, rows: int) -> tuple[list[port.Read], list[Any]]:
    """Return what is read, and the lanes that were lost, once there are so many rows."""
    found: list[port.Read] = []
    lost: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < rows:
            portion = await reader.read(100, 0.2)
            lost += portion.lost_lanes
            found = [each for each in found if each.lane not in portion.lost_lanes] + list(portion.read)
    return found, lost


def outgoing(target: str, value: bytes, key: bytes | None = b"key") -> port.Outgoing:
    """Return a message to publish."""
    body = kafka_client.Body(key, value, [("a", b"b")])
    return port.Outgoing(target, port.Message({}, body), {"own": "c"}, "id")

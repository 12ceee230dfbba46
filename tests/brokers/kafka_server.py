"""A Kafka of one node on a free port of loopback, in a directory of its own, ended with the block that it is used in.

Owns: finding its jars and a Java, its settings, start, kill and start again.
Does not own: fetching the jars (`make test-brokers`), what is asked of it.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batch.engine import java
from examples import processes

JARS = processes.REPOSITORY / ".tools" / "kafka"
MISSING = (
    f"Kafka: not run. Its jars are not in {JARS}; `make test-brokers` fetches them with Maven, from Maven Central."
)
_CLUSTER = "dGFycnktb2YtdGVzdHMtYQ"
# One node is both, and what it has answered it does not wait for any other to have.
_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=CLIENTS://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{port}
listener.security.protocol.map=CLIENTS:PLAINTEXT,CONTROLLER:PLAINTEXT
controller.listener.names=CONTROLLER
inter.broker.listener.name=CLIENTS
log.dirs={directory}/logs
auto.create.topics.enable=false
num.partitions=1
offsets.topic.num.partitions=1
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
group.min.session.timeout.ms=1000
log.retention.check.interval.ms=1000
log.cleaner.enable=false
"""
_SAFE = """
listeners=CLIENTS://127.0.0.1:{port},SAFE://127.0.0.1:{safe_port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=CLIENTS://127.0.0.1:{port},SAFE://127.0.0.1:{safe_port}
listener.security.protocol.map=CLIENTS:PLAINTEXT,SAFE:SASL_SSL,CONTROLLER:PLAINTEXT
listener.name.safe.ssl.keystore.type=PEM
listener.name.safe.ssl.keystore.location={identity}
sasl.enabled.mechanisms=PLAIN
listener.name.safe.plain.sasl.jaas.config={login} required user_{user}="{password}";
"""
_LOGIN = "org.apache.kafka.common.security.plain.PlainLoginModule"
USER, PASSWORD = "anna", "secret"
# Quick to start, and small beside what else runs.
_JAVA = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn")


def find() -> Path | None:
    """The folder of the jars."""
    return JARS if (JARS / ".whole").exists() else None


class KafkaServer(processes.ChildProcess):
    """`start` after `kill` starts it again on the same port and on what its directory holds.

    `identity`: a file with a key (PKCS 8) and its certificate, for a second port with TLS where USER shows PASSWORD.
    `more`: lines of its settings, which replace those above them.
    """

    def __init__(self, jars: Path, directory: Path, identity: Path | None = None, more: str = "") -> None:
        super().__init__("kafka", directory, {})
        self.port, self.safe_port, controller = (processes.free_port() for _ in range(3))
        self.directory = directory
        self._settings = directory / "server.properties"
        # What stands behind counts.
        text = (_SETTINGS if identity is None else f"{_SETTINGS}{_SAFE}") + more
        places = {"port": self.port, "safe_port": self.safe_port, "controller": controller, "directory": directory}
        self._settings.write_text(text.format(**places, identity=identity, login=_LOGIN, user=USER, password=PASSWORD))
        self._password = PASSWORD
        self._java = (str(java.find(os.environ).command), *_JAVA, "-cp", f"{jars}/*")

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def safe_url(self) -> str:
        return f"127.0.0.1:{self.safe_port}"

    def set_password(self, password: str) -> None:
        """Take another password of USER, from the next start on."""
        text = self._settings.read_text()
        self._settings.write_text(text.replace(f'"{self._password}"', f'"{password}"'))
        self._password = password

    def start(self) -> None:
        """Returns when the process runs; it does not answer yet."""
        if not (self.directory / "logs").exists():
            self._spawn(*self._java, "kafka.tools.StorageTool", "format", "-t", _CLUSTER, "-c", str(self._settings))
            self._wait_for_end()
        self._spawn(*self._java, "kafka.Kafka", str(self._settings))

    def wait_until_loaded(self, timeout_s: float = 600.0) -> None:
        """Returns when it answers, which it does when it has read what it had stored. Raises `ProcessFailed`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_listening():
            self._check_waiting(deadline_s, f"did not answer within {timeout_s:g} s")

    @functools.cached_property
    def admin(self) -> Any:
        """A client for what is no message."""
        from confluent_kafka import admin

        made: Any = admin.AdminClient({"bootstrap.servers": self.url, "reconnect.backoff.max.ms": 500, "log_level": 2})
        return made

    def make_topic(
        self, name: str, partitions: int = 1, settings: Mapping[str, str] | None = None, timeout_s: float = 300.0
    ) -> None:
        """Makes it, as soon as the server is part of its cluster, and another one of its name is gone; returns when it
        is known.
        """
        from confluent_kafka import KafkaError, KafkaException, TopicCollection, admin

        made: Any = admin
        topic = made.NewTopic(name, partitions, 1, config=dict(settings or {}))
        deadline_s = time.monotonic() + timeout_s
        passes = (KafkaError.TOPIC_ALREADY_EXISTS, KafkaError.UNKNOWN_TOPIC_OR_PART)
        steps = [
            lambda: self.admin.create_topics([topic])[name].result(),
            lambda: self.admin.describe_topics(TopicCollection([name]))[name].result(),
        ]
        while steps:
            try:
                steps[0]()
                steps.pop(0)
            except KafkaException as error:
                if not error.args[0].retriable() and error.args[0].code() not in passes:
                    raise
            self._check_waiting(deadline_s, f"did not make topic {name} within {timeout_s:g} s")

    def delete_topic(self, name: str, timeout_s: float = 300.0) -> None:
        """Deletes it; returns when the broker no longer tells of it, which learns of a deletion after the controller
        has answered.
        """
        from confluent_kafka import KafkaError, KafkaException, TopicCollection

        self.admin.delete_topics([name])[name].result()
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self.admin.describe_topics(TopicCollection([name]))[name].result()
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    return
                if not error.args[0].retriable():
                    raise
            self._check_waiting(deadline_s, f"still told of topic {name} {timeout_s:g} s after its deletion")

    def add_partitions(self, topic: str, total: int) -> None:
        """Until it has so many."""
        from confluent_kafka import admin

        made: Any = admin
        self.admin.create_partitions([made.NewPartitions(topic, total)])[topic].result()

    def _wait_for_end(self) -> None:
        status = self._running().wait(300)
        processes.guard.forget(self._running().pid)
        if status != 0:
            raise self.failed(f"ended with status {status}")

    def _is_listening(self) -> bool:
        with socket.socket() as connection:
            return connection.connect_ex(("127.0.0.1", self.port)) == 0

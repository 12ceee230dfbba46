"""The file of a relay: what is wrong is told by field, value and what is allowed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tarry_relay import port, relay_settings, sessions
from tarry_relay.health import Health
from tarry_relay.relay_metrics import RelayMetrics

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "relay" / "README.md").read_text(encoding="utf-8")
GOOD = """
relay.topic = "orders"
source = { name = "orders", dead_letters = "dead" }
broker.kind = "redis"
targets = [{ name = "due" }]
"""


def load(directory: Path, text: str) -> relay_settings.Settings:
    file = directory / "relay.toml"
    file.write_text(text)
    return relay_settings.load(file)


def test_the_least_file_has_defaults_for_the_rest(tmp_path: Path) -> None:
    settings = load(tmp_path, GOOD)
    assert settings.broker == relay_settings.Redis()
    assert settings.source.on_bad == "dead_letter"
    assert settings.relay.id


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"orders"\n', '"orders"\nrelay.permits = 0\n', "relay.permits is 0: Expected `int` >= 1"),
        ('"orders"\n', '"orders"\nrelay.permit = 1\n', "relay: Object contains unknown field `permit`"),
        ('"orders"\n', "7\n", "relay.topic is 7: Expected `str`, got `int`"),
        ('"redis"', '"rabbit"', "broker.kind is 'rabbit': Invalid value 'rabbit'"),
        ('"redis"', '"kafka"\nbroker.kept_bytes = -1', "broker.kept_bytes is -1: Expected `int` >= 0"),
        ('"redis"', '"redis"\nbroker.once_s = 0', "broker.once_s is 0: Expected `int` >= 1"),
        (', dead_letters = "dead"', "", "source.dead_letters is not set, and source.on_bad is 'dead_letter'"),
        ('"dead" }', '"dead", on_bad = "drop" }', "source.on_bad is 'drop': Invalid enum value"),
        ('[{ name = "due" }]', "[]", "targets is empty"),
        ('[{ name = "due" }]', "[{}]", "targets[0] must have exactly one of name and pattern"),
        ('[{ name = "due" }]', '[{ pattern = "(" }]', "targets[0].pattern is '('"),
        ('[{ name = "due" }]', '[{ name = "a", rate_limit = 0 }]', "targets[0].rate_limit is 0: Expected `float` > 0"),
        ('"due"', '"orders"', "targets[0].name is 'orders', which the relay reads itself"),
        ('"redis"', '"redis"\nretry.name = "orders"', "retry.name is 'orders', which is the source"),
        ('"dead" }', '"dead", target = "orders" }', "source.target is 'orders', which the relay reads itself"),
        ('"dead" }', '"dead", target = "gone" }', "if it is not misspelt, add [[targets]] with name = 'gone'"),
        ('"dead" }', '"dead", results = "orders" }', "source.results is 'orders', which the relay reads itself"),
        ('"dead" }', '"dead", levels = "1s 5" }', "source.levels has '5', which is no delay"),
        ('"dead" }', '"dead", delay_max = "7" }', "source.delay_max is '7', which is no delay"),
        ('"dead" }', '"dead", delay_max = "1h" }', "source.levels has '2h', which is longer than source.delay_max"),
        ("relay.topic", "relay topic", "Expected '=' after a key"),
    ],
)
def test_what_is_wrong_is_told(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(relay_settings.SettingsError) as failure:
        load(tmp_path, GOOD.replace(old, new, 1))
    assert told in str(failure.value)
    assert "relay.toml: " in str(failure.value)


@pytest.mark.parametrize("text", ["0d", "1ms", "1500ms", "90s", "61m", "25h", "7d"])
def test_a_delay_is_written_as_it_is_read(text: str) -> None:
    ms = relay_settings.delay_ms(text)
    assert ms is not None
    assert relay_settings.delay_text(ms) == text


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nats://anna:secret@one:4222", "nats://one:4222"),
        ("nats://anna:se//c@ret@one:4222", "nats://one:4222"),
        ("anna:secret@one:4222", "one:4222"),
        ("nats://one:4222", "nats://one:4222"),
        ("one:9092,two:9092", "one:9092,two:9092"),
    ],
)
def test_an_address_of_a_broker_is_told_without_a_password(url: str, told: str) -> None:
    assert relay_settings.without_credentials(url) == told


@pytest.mark.parametrize(("kind", "scheme"), [("nats", "nats://"), ("kafka", "")])
async def test_a_broker_that_does_not_answer_is_told_without_a_password(tmp_path: Path, kind: str, scheme: str) -> None:
    text = f'"{kind}"\nbroker.url = "{scheme}anna:secret@127.0.0.1:1"\nbroker.timeout_s = 0.1'
    with pytest.raises(port.Unreachable) as failure:
        async with sessions.opened(load(tmp_path, GOOD.replace('"redis"', text))):
            pass
    assert str(failure.value).startswith(f"{scheme}127.0.0.1:1 cannot be used within 0.1 s: ")
    assert "secret" not in str(failure.value)


def test_a_file_of_the_daemon_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    daemon = load(tmp_path, f'{GOOD}daemon.token_file = "{tmp_path}/none"\n').daemon
    with pytest.raises(relay_settings.SettingsError, match=r"daemon: .*token.*none"):
        relay_settings.client_of(daemon)


def test_half_a_certificate_is_told(tmp_path: Path) -> None:
    daemon = load(tmp_path, f'{GOOD}daemon.tls.cert_file = "a.pem"\n').daemon
    with pytest.raises(relay_settings.SettingsError, match="daemon: cert_file is given without key_file"):
        relay_settings.client_of(daemon)


def fields_of(kind: Any) -> set[str]:
    return {each.name for each in msgspec.structs.fields(kind)}


def test_the_page_has_each_setting() -> None:
    kinds = [
        getattr(relay_settings, name)
        for name in ("Daemon", "Tls", "Relay", "Source", "Headers", "Retry", "Target", "Kafka", "Nats", "Redis")
    ]
    rows = " ".join(line for line in PAGE.splitlines() if line.startswith("|"))
    named = set(re.findall(r"`(\w+)`", rows)) | set(re.findall(r"(\w+) = \"", rows))
    assert [each for kind in kinds for each in fields_of(kind) if each not in named] == []


def test_the_page_has_each_metric() -> None:
    metrics = RelayMetrics(Health())
    made = {each.name.removeprefix("tarry_relay") for each in metrics.registry.collect()}
    rows = [line for line in PAGE.splitlines() if line.startswith("| `tarry_relay_")]
    named = {each for row in rows for each in re.findall(r"`(?:tarry_relay)?(_\w+?)(?:_total)?(?:\{\w+\})?`", row)}
    assert named == made


def test_the_unit_waits_longer_than_a_relay_drains() -> None:
    unit = (REPOSITORY / "deploy" / "tarry-relay.service").read_text()
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(timeout_s) > relay_settings.Relay(topic="orders").drain_s

"""The file of a relay: what is wrong is told by field, value and what is allowed."""

from __future__ import annotations

import re
import typing
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
        ('"orders"\n', '"orders"\nrelay.permits = 0\n', ", line 3: relay.permits is 0; it must be a whole number >= 1"),
        ('"orders"\n', "7\n", ", line 2: relay.topic is 7; it must be a text"),
        ('"orders"\n', '"orders"\nrelay.listen = 1\n', ", line 3: relay.listen is 1; it must be a text"),
        ("targets", "daemon.tls = 1\ntargets", ", line 5: daemon.tls is 1; it must be a table"),
        ('"redis"', '"rabbit"', ", line 4: broker.kind is 'rabbit'; it must be kafka, nats or redis"),
        ('"redis"', "7", ", line 4: broker.kind is 7; it must be kafka, nats or redis"),
        (
            '"redis"',
            '"kafka"\nbroker.kept_bytes = -1',
            ", line 5: broker.kept_bytes is -1; it must be a whole number >= 0",
        ),
        ('"redis"', '"redis"\nbroker.once_s = 0', ", line 5: broker.once_s is 0; it must be a whole number >= 1"),
        ('"redis"', '"kafka"\nbroker.properties = { a = [] }', ", line 5: broker.properties[...]: Expected"),
        ('"redis"', '"kafka"\nbroker.properties = { "" = 1 }', ", line 5: broker.properties: Expected"),
        (', dead_letters = "dead"', "", ", line 3: source.dead_letters is not set, and source.on_bad is 'dead_letter'"),
        (
            '"dead" }',
            '"dead", on_bad = "drop" }',
            ", line 3: source.on_bad is 'drop'; it must be dead_letter, now or stop",
        ),
        ('targets = [{ name = "due" }]', "", ": targets is empty"),
        ('[{ name = "due" }]', "[]", ", line 5: targets is empty"),
        ('[{ name = "due" }]', "[{}]", ", line 5: targets[0] must have exactly one of name and pattern"),
        ('[{ name = "due" }]', "[1]", ", line 5: targets[0] is 1; it must be a table"),
        ('[{ name = "due" }]', '{ name = "due" }', "targets is a table; it must be an array of tables: [[targets]]"),
        ('[{ name = "due" }]', '[{ pattern = "(" }]', ", line 5: targets[0].pattern is '('"),
        ('"due" }', '"due", rate_limit = 0 }', ", line 5: targets[0].rate_limit is 0; it must be a number > 0"),
        ('"due"', '"orders"', ", line 5: targets[0].name is 'orders', which the relay reads itself"),
        ('"redis"', '"redis"\nretry.name = "orders"', ", line 5: retry.name is 'orders', which is the source"),
        ('"redis"', '"redis"\nretry = { name = "a", delays_ms = [] }', ", line 5: retry.delays_ms is []; it must be"),
        ('"dead" }', '"dead", target = "orders" }', ", line 3: source.target is 'orders', which the relay reads"),
        ('"dead" }', '"dead", target = "gone" }', "if it is not misspelt, add [[targets]] with name = 'gone'"),
        ('"dead" }', '"dead", results = "orders" }', ", line 3: source.results is 'orders', which the relay reads"),
        ('"dead" }', '"dead", levels = "1s 5" }', ", line 3: source.levels has '5', which is no delay"),
        ('"dead" }', '"dead", delay_max = "7" }', ", line 3: source.delay_max is '7', which is no delay"),
        ('"dead" }', '"dead", delay_max = "1h" }', ", line 3: source.levels has '2h', which is longer than"),
        ("relay.topic", "relay topic", "Expected '=' after a key in a key/value pair (at line 2, column 7)"),
    ],
)
def test_a_bad_value_is_named_with_its_line_and_what_it_must_be(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert told in told_of(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("relay.topic", "relai.topic", ", line 2: relai is not a setting; did you mean relay?"),
        (
            '"orders"\n',
            '"orders"\nrelay.permit = 1\n',
            ", line 3: relay.permit is not a setting; did you mean relay.permits?",
        ),
        (
            '"dead" }',
            '"dead", dead_letter = "a" }',
            "source.dead_letter is not a setting; did you mean source.dead_letters?",
        ),
        (
            '"dead" }',
            '"dead", headers.dealy = "a" }',
            ", line 3: source.headers.dealy is not a setting; did you mean source.headers.delay?",
        ),
        ("broker.kind", "broker.knid", ", line 4: broker.knid is not a setting; did you mean broker.kind?"),
        (
            '"redis"',
            '"redis"\nbroker.claims = 1',
            ", line 5: broker.claims is not a setting of redis; did you mean broker.claim_s?",
        ),
        (
            '"redis"',
            '"rabbit"\nbroker.claims = 1',
            ", line 5: broker.claims is not a setting; did you mean broker.claim_s?",
        ),
        ('"redis"', '"nats"\nbroker.once_s = 1', ", line 5: broker.once_s is not a setting of nats; it must be user, "),
        (
            "targets",
            "daemon.tls.cafile = 1\ntargets",
            ", line 5: daemon.tls.cafile is not a setting; did you mean daemon.tls.ca_file?",
        ),
        (
            '{ name = "due" }',
            '{ nmae = "due" }',
            ", line 5: targets[0].nmae is not a setting; did you mean targets[0].name?",
        ),
        (
            '{ name = "due" }',
            '\n  { name = "due" },  # the first\n  { nmae = "b" },\n',
            ", line 7: targets[1].nmae is not a setting; did you mean targets[1].name?",
        ),
        (
            'targets = [{ name = "due" }]',
            '[[targets]]\nname = "due"\n\n[[targets]]\nnmae = "b"\n',
            ", line 9: targets[1].nmae is not a setting; did you mean targets[1].name?",
        ),
        (
            "targets",
            "zzz = 1\ntargets",
            ", line 5: zzz is not a setting; it must be relay, source, broker, daemon, retry or targets",
        ),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_the_nearest_one(
    tmp_path: Path, old: str, new: str, told: str
) -> None:
    assert told in told_of(tmp_path, GOOD.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('relay.topic = "orders"', "", ": relay is not set; it is required"),
        ('relay.topic = "orders"', 'relay.id = "a"', ", line 2: relay.topic is not set; it is required"),
        ('name = "orders", ', "", ", line 3: source.name is not set; it is required"),
        ("broker.kind", "broker.url", ", line 4: broker.kind is not set; it is required"),
        ("}]\n", "}]\n\n[retry]\ncount_max = 1\n", ", line 7: retry.name is not set; it is required"),
    ],
)
def test_a_missing_key_is_named_with_the_line_of_its_table(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert told in told_of(tmp_path, GOOD.replace(old, new, 1))


def told_of(directory: Path, text: str) -> str:
    """What is said of a file that cannot be used, without its folder."""
    assert text != GOOD
    with pytest.raises(relay_settings.SettingsError) as failure:
        load(directory, text)
    said = str(failure.value)
    assert said.startswith(f"{directory}/relay.toml")
    return said.removeprefix(f"{directory}/")


def test_each_kind_of_broker_is_named() -> None:
    kinds = (relay_settings.Kafka, relay_settings.Nats, relay_settings.Redis)
    assert {each.__struct_config__.tag for each in kinds} == set(typing.get_args(relay_settings.Kind))


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


@pytest.mark.parametrize("address", ["https://tarry.example", "a:0", "a:1,,b:2"])
def test_an_address_that_is_none_is_told_by_the_name_of_its_setting(tmp_path: Path, address: str) -> None:
    daemon = load(tmp_path, f'{GOOD}daemon.address = "{address}"\n').daemon
    with pytest.raises(relay_settings.SettingsError, match=r"^daemon\.address is "):
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
    named = {each for row in rows for each in re.findall(r"`(?:tarry_relay)?(_\w+?)(?:_total)?(?:\{[\w, ]+\})?`", row)}
    assert named == made


def test_the_unit_waits_longer_than_a_relay_drains() -> None:
    unit = (REPOSITORY / "deploy" / "tarry-relay.service").read_text()
    (timeout_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(timeout_s) > relay_settings.Relay(topic="orders").drain_s

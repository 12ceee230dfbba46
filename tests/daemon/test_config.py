"""Settings: where they come from, and what is refused."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon import config, errors
from storage_backends import settings_file

REPOSITORY = Path(config.__file__).resolve().parent.parent


def load(*overrides: str, environment: dict[str, str] | None = None) -> config.Config:
    return config.load(environment=environment or {}, overrides=overrides)


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "tarryd.toml"
    path.write_text(text, encoding="utf-8")
    return path


def settings(section: type[msgspec.Struct] = config.Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Path and default of each; those of an array of tables with `[]`."""
    for field in msgspec.structs.fields(section):
        table = settings_file.table_of(field.type)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, f"{path}{field.name}.")
        elif table is not None:
            yield from settings(table, f"{path}{field.name}[].")
        else:
            yield f"{path}{field.name}", field.default


def test_without_anything_it_serves_on_loopback_with_a_local_directory() -> None:
    defaults = load()
    assert (defaults.grpc.listen, defaults.metrics.listen) == ("127.0.0.1:7461", "127.0.0.1:7462")
    assert (defaults.store.kind, defaults.store.path) == ("local", "./tarry-data")
    assert defaults.daemon_id == f"{socket.gethostname()}-7461"


def test_the_environment_goes_before_the_file_and_set_before_both(tmp_path: Path) -> None:
    path = file(tmp_path, "[journal]\nslot_bytes_max = 100_000\ncheckpoint_slots = 5\ncommit_linger_ms = 1\n")
    environment = {"TARRY_JOURNAL__CHECKPOINT_SLOTS": "6", "TARRY_JOURNAL__COMMIT_LINGER_MS": "2", "TARRY_ADDRESS": "x"}
    journal = config.load(path, environment=environment, overrides=["journal.commit_linger_ms=3"]).journal
    assert (journal.slot_bytes_max, journal.checkpoint_slots, journal.commit_linger_ms) == (100_000, 6, 3)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("store.s3.bucket=123", "123"),
        ("daemon.insecure=true", True),
        ("daemon.insecure=0", False),
        ("bucket.age_max_s=5", 5.0),
        ("store.path=a=b", "a=b"),
        ("daemon.id=node-1.example", "node-1.example"),
    ],
)
def test_text_becomes_the_type_of_the_setting(override: str, value: object) -> None:
    found: Any = load(override)
    for name in override.partition("=")[0].split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[jurnal]\n", "jurnal is not a setting; did you mean journal?"),
        (
            "[journal]\nslot_byte_max = 1\n",
            "journal.slot_byte_max is not a setting; did you mean journal.slot_bytes_max?",
        ),
        ("[store.s3]\nbuckets = 'x'\n", "store.s3.buckets is not a setting; did you mean store.s3.bucket?"),
        ("[store]\nzzz = 1\n", "store.zzz is not a setting"),
        ("journal = 5\n", "journal is a section"),
        ("[journal]\nslot_bytes_max = 5\n", "journal.slot_bytes_max is 5; it must be an integer >= 65536"),
        ("[journal]\nslot_bytes_max = 'many'\n", "journal.slot_bytes_max is 'many'; it must be an integer"),
        ("[store]\nkind = 'tape'\n", "store.kind is 'tape'; it must be local or s3"),
        ("[store.s3]\nattempts = 0\n", "store.s3.attempts is 0; it must be an integer >= 1"),
        ("[daemon]\nid = 'a/b'\n", "daemon.id is 'a/b'; it must be 1 to 128 letters, digits"),
        ('[daemon]\nid = "a\\n"\n', "daemon.id is 'a\\n'"),
        ("[grpc]\nlisten = 'nowhere'\n", "grpc.listen is 'nowhere'; it must be host:port with a port from 0 to 65535"),
        ("[grpc]\nlisten = '127.0.0.1:70000'\n", "grpc.listen is '127.0.0.1:70000', and 70000 is no port"),
        ("[metrics]\nlisten = '127.0.0.1:65536'\n", "metrics.listen is '127.0.0.1:65536', and 65536 is no port"),
        ("[daemon]\naddress = 'a:99999'\n", "daemon.address is 'a:99999', and 99999 is no port: it must be from 0 to"),
        ("[store.s3]\nendpoint_url = 'http://a:99999/b'\n", "store.s3.endpoint_url is 'http://a:99999/b', and 99999"),
        ("[store.s3]\nendpoint_url = 'ftp://a'\n", "endpoint_url is 'ftp://a'; it must be a URL that begins with http"),
        ("[store.s3]\naddressing = 'x'\n", "store.s3.addressing is 'x'; it must be auto or path or virtual"),
        ("[daemon]\ninsecure = 'yes'\n", "daemon.insecure is 'yes'; it must be true or false"),
        ("x = \n", "is not TOML"),
        ("[store]\nkind = 's3'\n", "store.s3.bucket is not set"),
        (
            "[bucket]\nrows_max = 7\n",
            "bucket.min_index_count_per_bucket is 50000; it must be at most bucket.rows_max, which is 7",
        ),
        ("[bucket]\nmax_indexes_per_bucket_snapshot_segment = 0\n", "max_indexes_per_bucket_snapshot_segment is 0"),
        (
            "[bucket]\nmax_indexes_per_bucket_snapshot_segment = 9\n",
            "at most bucket.max_indexes_per_bucket_snapshot_segment",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_setting_value_and_range(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        config.load(file(tmp_path, text), environment={})
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("environment", "override", "says"),
    [
        (
            {"TARRY_STORE__PAHT": "x"},
            None,
            "store.paht (from TARRY_STORE__PAHT) is not a setting; did you mean store.path?",
        ),
        (
            {"TARRY_JOURNAL__SLOT_BYTES_MAX": "x"},
            None,
            "journal.slot_bytes_max (from TARRY_JOURNAL__SLOT_BYTES_MAX) is 'x'; it must be an integer",
        ),
        ({}, "grpc.lisen=x", "did you mean grpc.listen?"),
        ({}, "store.kind=tape", "store.kind (from --set store.kind=tape) is 'tape'; it must be local or s3"),
        ({}, "log.level=loud", "it must be debug or info or "),
        ({}, "grpc.listen=x", "grpc.listen (from --set grpc.listen=x) is 'x'; it must be host:port"),
        ({}, "grpc", "--set grpc is not section.key=value"),
        ({}, "grpc=x", "grpc (from --set grpc=x) is a section, not a setting"),
        ({}, "grpc.listen.port=1", "grpc.listen (from --set grpc.listen.port=1) is a setting, not a section"),
    ],
)
def test_a_wrong_override_is_refused_with_where_it_came_from(
    environment: dict[str, str], override: str | None, says: str
) -> None:
    with pytest.raises(errors.InvalidArgument) as refused:
        load(*([override] if override else []), environment=environment)
    assert says in str(refused.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidArgument, match=r"nowhere\.toml cannot be read"):
        config.load(tmp_path / "nowhere.toml", environment={})


@pytest.mark.parametrize("listen", ["0.0.0.0:7461", "[::]:7461", "10.0.0.5:7461", "example.org:7461"])
@pytest.mark.parametrize("section", ["grpc", "metrics"])
def test_another_address_than_loopback_needs_insecure(section: str, listen: str) -> None:
    needed = {"grpc": "tls.cert_file and access.identities_file", "metrics": "metrics.tls and metrics.tokens"}[section]
    with pytest.raises(errors.InvalidArgument, match=f"{section}.listen is .*, and {needed} are not set"):
        load(f"{section}.listen={listen}")
    assert load(f"{section}.listen={listen}", "daemon.insecure=true").daemon.insecure


TLS = ("tls.cert_file=a", "tls.key_file=b")
IDENTITIES = "access.identities_file=c"


def test_another_address_than_loopback_needs_tls_and_identities() -> None:
    every = "grpc.listen=0.0.0.0:1", "metrics.listen=0.0.0.0:2", *TLS, IDENTITIES, "metrics.tls=true"
    assert load(*every, "metrics.tokens=true").grpc.listen == "0.0.0.0:1"
    with pytest.raises(errors.InvalidArgument, match=r"metrics\.listen is .*, and metrics\.tokens is not set"):
        load(*every)
    with pytest.raises(errors.InvalidArgument, match=r"grpc\.listen is .*, and access\.identities_file is not set"):
        load("grpc.listen=0.0.0.0:1", *TLS)
    with pytest.raises(errors.InvalidArgument, match=r"grpc\.listen is .*, and tls\.cert_file is not set"):
        load("grpc.listen=0.0.0.0:1", IDENTITIES)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["tls.cert_file=a"], "tls.cert_file is set, and tls.key_file is not"),
        (["tls.key_file=a"], "tls.key_file is set, and tls.cert_file is not"),
        (["tls.client_ca_file=a"], "tls.client_ca_file is set, and tls.cert_file is not"),
        (["metrics.tls=true"], "metrics.tls is set, and tls.cert_file is not"),
        (["metrics.tokens=true"], "metrics.tokens is set, and access.identities_file is not"),
        (["grpc.unix_socket=relative"], "grpc.unix_socket.*it must be an absolute path"),
    ],
)
def test_what_a_setting_of_the_door_needs_is_named(given: list[str], says: str) -> None:
    with pytest.raises(errors.InvalidArgument, match=says):
        load(*given)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.9.9.9:1", "[::1]:7461", "localhost:7461"])
def test_loopback_needs_nothing(listen: str) -> None:
    assert load(f"grpc.listen={listen}").grpc.listen == listen


def test_a_wrong_table_of_delay_levels_is_refused_with_the_place() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"redelivery\.delay_levels: .*'5x' at character 4"):
        load("redelivery.delay_levels=1s 5x")
    with pytest.raises(errors.InvalidArgument, match="'2h' at character 4: the largest delay is 3600000 ms"):
        load("redelivery.delay_levels=1h 2h", "limits.delay_max_ms=3600000")


def test_the_default_table_of_delay_levels_stands_beside_any_limit_on_delays() -> None:
    assert load("limits.delay_max_ms=1000").read_delay_levels().top == 18


def test_levels_above_the_last_are_refused_where_the_configuration_says_so() -> None:
    assert load().read_delay_levels().clamp
    assert not load("redelivery.clamp_delay_level=false").read_delay_levels().clamp


def test_an_address_is_split_into_host_and_port() -> None:
    assert config.split_address("[::1]:7461") == ("::1", 7461)
    assert config.split_address("localhost:0") == ("localhost", 0)


def test_every_setting_is_read_somewhere() -> None:
    files = [file for folder in ("daemon", "storage_backends") for file in (REPOSITORY / folder).rglob("*.py")]
    code = "\n".join(file.read_text() for file in files if file.name != "config.py")
    # These are read by `Config` itself.
    unread = {path for path, _ in settings() if not re.search(rf"\.{path.rpartition('.')[2]}\b", code)}
    assert unread <= {
        "daemon.id",
        "daemon.insecure",
        "deletion.owners[].insecure",
        "redelivery.clamp_delay_level",
    }


def test_every_setting_can_be_set_to_its_default() -> None:
    given = [f"{path}={default}" for path, default in settings() if default is not None and "[]" not in path]
    assert load(*given) == load()


def test_the_reference_is_what_config_py_says() -> None:
    check = [sys.executable, str(REPOSITORY / "scripts" / "gen_configuration.py"), "--check"]
    subprocess.run(check, check=True, timeout=600)

"""What the examples of deploy/ and the image allow: nothing that the daemon does not need."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemon import auth, config, errors
from tests._support.processes import run_child

REPOSITORY = Path(__file__).resolve().parents[2]
UNIT, NETWORK = REPOSITORY / "deploy" / "tarryd.service", REPOSITORY / "deploy" / "tarryd-network.conf"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
DAEMON = REPOSITORY / "deploy" / "kubernetes" / "tarryd.yaml"
KUBERNETES = sorted((REPOSITORY / "deploy" / "kubernetes").glob("*.yaml"))
# Kinds of volumes that Pod Security "restricted" allows.
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
EXPOSURE_MOST = 2.0


def pods(found: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods, wherever they stand."""
    if isinstance(found, dict):
        if "containers" in found:
            yield found
        for each in found.values():
            yield from pods(each)


def load(environment: Mapping[str, str]) -> config.Config:
    return config.load(environment=environment)


@pytest.mark.parametrize("file", KUBERNETES, ids=lambda file: file.name)
def test_pods_fit_the_restricted_pod_security(file: Path) -> None:
    found = [pod for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) for pod in pods(each)]
    assert found
    for pod in found:
        of_pod = pod["securityContext"]
        assert (of_pod["runAsNonRoot"], of_pod["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
        assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
        assert {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}} <= VOLUMES
        for container in pod["containers"]:
            allowed = container["securityContext"]
            assert (allowed["allowPrivilegeEscalation"], allowed["capabilities"]) == (False, {"drop": ["ALL"]})
            assert allowed["readOnlyRootFilesystem"]
            assert not [port for port in container.get("ports", []) if "hostPort" in port]
            assert "memory" in container["resources"]["limits"]


def test_the_unit_has_limits_and_little_exposure() -> None:
    unit = UNIT.read_text(encoding="utf-8")
    assert {"MemoryMax", "TasksMax"} <= {line.partition("=")[0] for line in unit.splitlines()}
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    said = subprocess.run(
        [analyze, "security", "--offline=true", str(UNIT)], capture_output=True, text=True, check=False, timeout=600
    )
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", said.stdout)
    assert exposure is not None, said
    assert float(exposure[1]) <= EXPOSURE_MOST, said.stdout


def test_the_unit_is_for_its_own_machine_and_its_part_lets_others_in_by_tls_and_identities() -> None:
    own, network = (
        dict(re.findall(r"^Environment=(\w+)=(.+)$", file.read_text(encoding="utf-8"), re.MULTILINE))
        for file in (UNIT, NETWORK)
    )
    assert config.is_loopback(load(own).grpc.listen)
    assert load(own | network).grpc.listen == "0.0.0.0:7461"
    copied = re.findall(r"^LoadCredential=([\w.]+):", NETWORK.read_text(encoding="utf-8"), re.MULTILINE)
    assert {f"%d/{name}" for name in copied} == {value for value in network.values() if value.startswith("%d/")}


def image_environment() -> dict[str, str]:
    (given,) = re.findall(r"^ENV (PATH=.*?[^\\])$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return dict(re.findall(r"(TARRY_\w+)=(\S+)", given))


def test_the_image_serves_nobody_until_it_is_told_who() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"grpc\.listen.* tls\.cert_file and access\.identities_file"):
        load(image_environment())
    told = [
        dict(re.findall(r"-e (TARRY_\w+)=(\S+)", way))
        for way in re.findall(r"docker run -p.*?tarryd$", DOCKERFILE, re.MULTILINE | re.DOTALL)
    ]
    with_tls, without = (load(image_environment() | each) for each in told)
    assert (with_tls.daemon.insecure, with_tls.metrics.tls, with_tls.metrics.tokens) == (False, True, True)
    assert without.daemon.insecure


def test_the_image_has_a_numeric_user_and_a_health_check() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE) == ["7461"]
    (check,) = re.findall(r"^HEALTHCHECK .* CMD (.+)$", DOCKERFILE, re.MULTILINE)
    for status, is_well in ((0, True), (1, False), (2, False), (4, True)):
        told = run_child(["/bin/sh", "-c", f"tarryd() {{ return {status}; }}; {check}"])
        assert (told.returncode == 0) == is_well, status


def test_the_daemon_of_kubernetes_is_told_what_there_is() -> None:
    found = {each["kind"]: each for each in yaml.safe_load_all(DAEMON.read_text(encoding="utf-8"))}
    (container,) = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    pod = found["StatefulSet"]["metadata"]["name"] + "-0"
    settings = load(image_environment() | {name: value.replace("$(POD)", pod) for name, value in given.items()})
    assert (settings.daemon.insecure, settings.daemon_id) == (False, pod)
    mounted = [each["mountPath"] for each in container["volumeMounts"]]
    for path in (settings.tls.cert_file, settings.tls.key_file, settings.access.identities_file):
        assert str(Path(str(path)).parent) in mounted
    assert str(Path(str(settings.grpc.unix_socket)).parent) in mounted


def test_the_example_of_identities_is_one() -> None:
    known = auth.read_identities(str(REPOSITORY / "deploy" / "identities.toml"))
    assert known.of_certificate(["workers.orders.example"]) is not None

"""The compose file: read by docker-compose, and its options and files are those of this project."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
import yaml

from support.deployments import DEPLOY, ROOT, variables_of

COMPOSE = DEPLOY / "compose"
FILE = COMPOSE / "docker-compose.yml"
TIMEOUT_S = 60.0
UNKNOWN_VARIABLES = {"PYTHONPATH"}

DOCKER_COMPOSE = shutil.which("docker-compose")


@pytest.fixture(scope="module")
def services():
    return yaml.safe_load(FILE.read_text())["services"]


def of_gazette(services):
    return {name: each for name, each in services.items() if each["image"].startswith("gazette-")}


@pytest.mark.skipif(
    DOCKER_COMPOSE is None and "CI" not in os.environ, reason="docker-compose is not installed"
)
def test_docker_compose_accepts_the_file():
    found = subprocess.run(
        [DOCKER_COMPOSE, "--file", FILE, "config", "--services"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    assert set(found.stdout.split()) == {
        *("etcd", "broker-a", "broker-b", "broker-c", "totals", "prometheus", "grafana")
    }


def test_every_variable_is_an_option_and_every_broker_has_a_zone_of_its_own(services):
    zones = set()
    for name, each in of_gazette(services).items():
        [command, *_] = each["command"]
        assert set(each["environment"]) - UNKNOWN_VARIABLES <= variables_of(command), name
        if command == "serve":
            zones.add(each["environment"]["BROKER_ZONE"])
            assert each["environment"]["BROKER_HOST"] == name
    assert len(zones) == 3


def test_processes_are_confined_and_get_time_to_drain(services):
    for name, each in of_gazette(services).items():
        assert each["read_only"] is True, name
        assert each["cap_drop"] == ["ALL"], name
        assert each["stop_grace_period"] in {"10m", "2m"}, name
        assert "healthcheck" in each, name


def test_ports_are_of_this_machine_only(services):
    published = [port for each in services.values() for port in each.get("ports", [])]
    assert sorted(published) == [
        "127.0.0.1:3000:3000",
        "127.0.0.1:8080:8080",
        "127.0.0.1:9090:9090",
    ]


def test_files_that_are_mounted_exist(services):
    for each in services.values():
        for volume in each.get("volumes", []):
            source = volume.partition(":")[0]
            if source.startswith("."):
                assert (COMPOSE / source).exists(), source
        if "build" in each:
            assert (COMPOSE / each["build"]["context"]).resolve() == ROOT
            assert (ROOT / each["build"]["dockerfile"]).exists()


def test_prometheus_scrapes_every_process_and_grafana_asks_prometheus(services):
    jobs = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    targets = {
        target for job in jobs for each in job["static_configs"] for target in each["targets"]
    }
    assert {target.partition(":")[0] for target in targets} == {*of_gazette(services), "etcd"}
    provisioned = COMPOSE / "grafana" / "provisioning"
    [source] = yaml.safe_load((provisioned / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    [boards] = yaml.safe_load((provisioned / "dashboards/gazette.yml").read_text())["providers"]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert boards["options"]["path"] in mounted


def test_the_application_can_be_imported():
    subprocess.run(
        [sys.executable, "-c", "from totals import totals; assert totals.sources"],
        cwd=COMPOSE / "application",
        env={**os.environ, "PYTHONPATH": f"{ROOT}"},
        timeout=TIMEOUT_S,
        check=True,
    )

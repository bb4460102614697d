"""The chart and its rendered sets: valid for Kubernetes, and by the policies of this project.

No cluster is needed; test_upgrade.py has an API server. What only the controllers of a cluster do
is not tested.
"""

from __future__ import annotations

import subprocess

import kubernetes_validate
import pytest
import yaml

from gazette_sdk import __version__
from support.deployments import (
    DEPLOY,
    ROOT,
    flags_of,
    objects_of,
    script,
    selects,
    variables_of,
    workloads_of,
)

RENDER = script("render-manifests")
SETS = RENDER.sets()
HELM = RENDER.tool("helm")
TIMEOUT_S = 60.0

MINORS = 6
"""Number of the latest minor versions of Kubernetes that take all sets."""

FOREIGN = {"Certificate", "PodMonitor", "PrometheusRule"}
"""Kinds of other projects, of which there are no schemas."""

LEASE_S = 20
"""Default lifetime of a lease: a process that lives must not be ended before."""

PROBES = ("startup", "readiness", "liveness")
COMMANDS = {"broker": "serve", "consumer": "run-consumer"}

RULES = ("alerts.yml", "rules.yml")
CONFIG_MAP_BYTES_MAX = 1 << 20

OWN_VARIABLES = {"POD_NAME", "POD_IP", "NAMESPACE", "ZONE", "HOST_IP"}
"""Variables for arguments, which are no options."""

needs_helm = pytest.mark.skipif(
    HELM is None, reason="helm is not here, so the chart is not rendered: scripts/kube-tools"
)


def text_of(name: str) -> str:
    return (RENDER.TARGET / name / "gazette.yaml").read_text()


@pytest.fixture(params=SETS)
def objects(request):
    """The objects of each set."""
    return objects_of(text_of(request.param))


@pytest.fixture
def workloads(objects):
    """The objects that make pods."""
    return list(workloads_of(objects))


def named(objects, kind):
    return [each for each in objects if each["kind"] == kind]


# ------------------------------------------------------------------ valid


def latest_minors():
    versions = reversed(kubernetes_validate.utils.all_versions())
    return list(dict.fromkeys(kubernetes_validate.utils.major_minor(each) for each in versions))[
        :MINORS
    ]


@pytest.mark.parametrize("minor", latest_minors())
def test_every_object_of_every_set_is_valid(minor):
    unknown = set()
    for name in SETS:
        for each in objects_of(text_of(name)):
            try:
                kubernetes_validate.validate(each, minor, strict=True)
            except kubernetes_validate.SchemaNotFoundError:
                unknown.add(each["kind"])
    assert unknown <= FOREIGN


def test_a_misspelled_field_is_found(objects):
    [budget, *_] = named(objects, "PodDisruptionBudget")
    budget["spec"]["maxUnavailible"] = 1
    with pytest.raises(kubernetes_validate.ValidationError, match="maxUnavailible"):
        kubernetes_validate.validate(budget, latest_minors()[0], strict=True)


@pytest.mark.parametrize("name", SETS)
def test_the_rendered_set_is_of_this_chart_and_can_be_applied_by_itself(name):
    head = text_of(name).splitlines()[:2]
    assert head == RENDER.HEAD.format(name=name, digest=RENDER.digest(name)).splitlines(), (
        "the chart has changed: run scripts/render-manifests"
    )
    directory = RENDER.TARGET / name
    kustomization = yaml.safe_load((directory / "kustomization.yaml").read_text())
    files = {path.name for path in directory.iterdir()}
    assert files == {"kustomization.yaml", *kustomization["resources"]}
    namespace = yaml.safe_load((directory / "namespace.yaml").read_text())
    assert namespace["metadata"]["name"] == kustomization["namespace"] == RENDER.NAMESPACE
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((RENDER.CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    values = yaml.safe_load((RENDER.CHART / "values.yaml").read_text())
    assert values["images"]["broker"] == f"gazette-broker:{__version__}"


# ------------------------------------------------------------------ helm


def helm(*arguments):
    return subprocess.run(
        [HELM, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@needs_helm
@pytest.mark.parametrize("name", SETS)
def test_helm_renders_what_is_checked_in(name):
    assert RENDER.content(HELM, name) == text_of(name), "run scripts/render-manifests"


@needs_helm
@pytest.mark.parametrize("name", SETS)
def test_helm_finds_no_fault_in_the_chart(name):
    values = RENDER.CHART / "sets" / f"{name}.yaml"
    found = helm(
        *("lint", "--strict", RENDER.CHART, "--values", values),
        *("--kube-version", RENDER.KUBERNETES),
    )
    assert found.returncode == 0, found.stdout


def rendered(*settings):
    sets = [part for each in settings for part in ("--set-json", each)]
    return helm("template", "gazette", RENDER.CHART, "--kube-version", RENDER.KUBERNETES, *sets)


@needs_helm
def test_a_merge_reaches_every_field():
    found = rendered(
        'brokers.merge.container={"lifecycle": {"preStop": {"sleep": {"seconds": 1}}}}',
        'brokers.merge.pod={"priorityClassName": "high", "terminationGracePeriodSeconds": 5}',
        'brokers.merge.service={"spec": {"type": "LoadBalancer"}}',
        'etcd.merge.workload={"metadata": {"annotations": {"a": "b"}}}',
    )
    objects = objects_of(found.stdout)
    broker, *_ = (each for each in workloads_of(objects) if each.component == "broker")
    assert broker.pod["priorityClassName"] == "high"
    assert broker.pod["terminationGracePeriodSeconds"] == 5
    assert broker.pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"] == 1
    assert broker.pod["containers"][0]["name"] == "broker"
    types = {
        each["metadata"]["name"]: each["spec"].get("type") for each in named(objects, "Service")
    }
    assert types["gazette"] == "LoadBalancer"
    [etcd] = (each for each in workloads_of(objects) if each.component == "etcd")
    assert etcd.source["metadata"]["annotations"] == {"a": "b"}


@needs_helm
@pytest.mark.parametrize(
    ("settings", "strategy"),
    [
        (['zones=["a","b","c"]', "brokers.perZone=1", "brokers.replication=2"], "OnDelete"),
        (['zones=["a","b","c"]', "brokers.perZone=2", "brokers.replication=3"], "RollingUpdate"),
        (['zones=["a","b","c"]', "brokers.perZone=2", "brokers.replication=4"], "OnDelete"),
        (['zones=["a"]', "brokers.perZone=3", "brokers.replication=3"], "RollingUpdate"),
        (['zoneFrom="podLabel"', "brokers.perZone=1", "brokers.replication=2"], "RollingUpdate"),
    ],
)
def test_sets_of_several_zones_are_updated_together_only_where_enough_brokers_remain(
    settings, strategy
):
    found = list(workloads_of(objects_of(rendered(*settings).stdout)))
    assert {
        each.source["spec"]["updateStrategy"]["type"]
        for each in found
        if each.component == "broker"
    } == {strategy}


@needs_helm
@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (['brokers.storage="ephemeral"', "tls.enabled=true"], "use storage volume"),
        (['brokers.storage="ephemeral"', 'zoneFrom="podLabel"'], "needs zoneFrom affinity"),
        (['brokers.fileRoot="/var/lib/gazette/fragments"'], "use an object store"),
        (['consumers=[{"name": "totals", "application": "a:b"}]'], "'image'"),
        (["brokers.perZones=2"], "'perZones'"),
        (["etcd.members=2"], "/etcd/members"),
    ],
)
def test_values_that_cannot_work_are_refused_with_a_remedy(settings, problem):
    found = rendered(*settings)
    assert found.returncode != 0
    assert problem in found.stderr


# ------------------------------------------------------------------ policies


def test_every_pod_meets_the_restricted_standard(workloads):
    for each in workloads:
        security = each.pod["securityContext"]
        assert security["runAsNonRoot"] is True, each
        assert security["runAsUser"] == security["fsGroup"] == 10001, each
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, each
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(each.pod), each
        kinds = {kind for volume in each.pod.get("volumes", []) for kind in volume} - {"name"}
        assert kinds <= {"emptyDir", "secret", "configMap", "projected", "persistentVolumeClaim"}
        for container in each.containers:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, each


def test_no_pod_has_a_token_of_kubernetes_or_variables_of_services(workloads):
    for each in workloads:
        assert each.pod["automountServiceAccountToken"] is False, each
        assert each.pod["enableServiceLinks"] is False, each


def test_secrets_are_files_or_references_and_never_values(objects, workloads):
    assert not named(objects, "Secret")
    for each in workloads:
        for container in each.containers:
            for variable in container.get("env", []):
                if any(word in variable["name"] for word in ("KEY", "PASSWORD", "TOKEN")):
                    assert "secretKeyRef" in variable["valueFrom"], each
            for argument in container.get("args", []):
                flag, _, value = argument.partition("=")
                if flag.endswith(("auth-keys-file", "password-file", "key-file")):
                    assert value.startswith("/etc/gazette/"), each
                assert not flag.endswith(("auth-keys", "password", "auth-token")), each


def test_every_container_has_a_limit_of_memory_and_says_what_it_needs(workloads):
    for each in workloads:
        for container in each.containers:
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), each
            assert "memory" in resources["limits"] or "minimal" in str(each), each


def test_every_probe_asks_a_port_of_its_container_and_waits_for_longer_than_a_lease(workloads):
    for each in workloads:
        if not each.serves:
            continue
        for container in each.containers:
            ports = {port["name"] for port in container["ports"]}
            probes = {
                kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")
            }
            paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
            assert {probe["httpGet"]["port"] for probe in probes.values()} <= ports, each
            live = probes["liveness"]
            assert live["periodSeconds"] * live["failureThreshold"] > 2 * LEASE_S, each
            start = probes["startup"]
            assert start["periodSeconds"] * start["failureThreshold"] >= 300, each
            if each.component != "etcd":
                assert paths == {
                    "startup": "/debug/live",
                    "readiness": "/debug/ready",
                    "liveness": "/debug/live",
                }, each


def test_brokers_and_consumers_get_time_to_drain(workloads):
    for each in workloads:
        grace = each.pod.get("terminationGracePeriodSeconds")
        if each.component == "broker":
            has_volume = "volumeClaimTemplates" in each.source["spec"]
            assert grace == (600 if has_volume else 21600), each
        elif each.component.startswith("consumer"):
            assert grace == 120, each
            assert each.source["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_one_budget_covers_all_brokers_and_each_other_kind_of_pod(objects, workloads):
    budgets = named(objects, "PodDisruptionBudget")
    for each in workloads:
        if not each.serves:
            continue
        [budget] = (
            budget
            for budget in budgets
            if selects(budget["spec"]["selector"]["matchLabels"], each.labels)
        )
        assert budget["spec"]["maxUnavailable"] == 1, each
        assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert len(budgets) == len({each.component for each in workloads if each.serves})


def test_every_flag_and_variable_is_an_option_of_its_command(workloads):
    for each in workloads:
        command = COMMANDS.get(each.component.partition("-")[0])
        if command is None or not each.serves:
            continue
        [container] = each.pod["containers"]
        assert container["args"][0] == command
        flags = [argument.partition("=")[0] for argument in container["args"][1:]]
        flags = [flag for flag in flags if flag.startswith("-")]
        assert set(flags) <= flags_of(command), each
        assert len(flags) == len(set(flags)), each
        variables = {variable["name"] for variable in container["env"]}
        assert variables <= variables_of(command) | OWN_VARIABLES, each


def test_every_variable_in_an_argument_is_set(workloads):
    for each in workloads:
        for container in each.containers:
            variables = {variable["name"] for variable in container.get("env", [])}
            for argument in container.get("args", []):
                used = {part.partition(")")[0] for part in argument.split("$(")[1:]}
                assert used <= variables, (str(each), argument)


def test_every_path_in_an_argument_is_below_a_mount(workloads):
    for each in workloads:
        for container in each.containers:
            mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
            volumes = {volume["name"] for volume in each.pod.get("volumes", [])}
            claims = each.source["spec"].get("volumeClaimTemplates", [])
            volumes |= {claim["metadata"]["name"] for claim in claims}
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes, each
            for argument in container.get("args", []):
                flag, _, path = argument.partition("=")
                if path.startswith("/") and flag.startswith("--") and flag != "--etcd.prefix":
                    assert any(path.startswith(mount) for mount in mounts), (str(each), argument)


def test_every_service_selects_pods_that_have_its_port(objects, workloads):
    names = set()
    for service in named(objects, "Service"):
        names.add(service["metadata"]["name"])
        selected = [each for each in workloads if selects(service["spec"]["selector"], each.labels)]
        assert selected, service["metadata"]["name"]
        for each in selected:
            for port in service["spec"]["ports"]:
                assert each.ports()[port["targetPort"]] == port["port"], each
    for each in workloads:
        if each.source["kind"] == "StatefulSet":
            assert each.source["spec"]["serviceName"] in names, each


def test_a_set_selects_its_own_pods_and_no_others(workloads):
    selectors = {
        str(each): each.source["spec"]["selector"]["matchLabels"]
        for each in workloads
        if each.serves
    }
    for each in workloads:
        matching = [name for name, selector in selectors.items() if selects(selector, each.labels)]
        assert matching == ([str(each)] if each.serves else [])


def test_addresses_in_arguments_are_those_of_services_and_pods(objects, workloads):
    services = {each["metadata"]["name"]: each for each in named(objects, "Service")}
    pods = {
        f"{each.source['metadata']['name']}-{number}": each
        for each in workloads
        if each.source["kind"] == "StatefulSet"
        for number in range(each.source["spec"]["replicas"])
    }
    for each in workloads:
        for container in each.containers:
            for argument in container.get("args", []):
                if not argument.startswith("--") or ".$(NAMESPACE).svc" not in argument:
                    continue
                for address in argument.partition("=")[2].split(","):
                    host = address.rpartition("://")[2].partition(".$(NAMESPACE)")[0]
                    *pod, service = host.split(".")
                    assert service in services, (str(each), argument)
                    if pod and pod != ["$(POD_NAME)"]:
                        assert pods[pod[0]].source["spec"]["serviceName"] == service
                    if pod:
                        assert services[service]["spec"]["clusterIP"] == "None"
                        assert services[service]["spec"]["publishNotReadyAddresses"] is True


def test_etcd_members_name_all_members(workloads):
    for each in workloads:
        if each.component == "etcd":
            [container] = each.containers
            [members] = (
                argument.partition("=")[2]
                for argument in container["args"]
                if argument.startswith("--initial-cluster=")
            )
            name = each.source["metadata"]["name"]
            count = each.source["spec"]["replicas"]
            assert [member.partition("=")[0] for member in members.split(",")] == [
                f"{name}-{number}" for number in range(count)
            ]
            assert count % 2 == 1


def test_network_policies_admit_brokers_consumers_and_named_clients_only(objects, workloads):
    policies = named(objects, "NetworkPolicy")
    for policy in policies:
        covered = [
            each
            for each in workloads
            if selects(policy["spec"]["podSelector"]["matchLabels"], each.labels)
        ]
        assert covered
        for rule in policy["spec"]["ingress"]:
            assert rule["from"]
            for port in rule["ports"]:
                for each in covered:
                    ports = each.ports()
                    assert port["port"] in {*ports, *ports.values()}
    if policies:
        assert len(policies) == len({each.component for each in workloads if each.serves})
    etcd = [each for each in policies if each["metadata"]["name"].endswith("-etcd")]
    for policy in etcd:
        admitted = [
            peer["podSelector"]["matchLabels"]
            for rule in policy["spec"]["ingress"]
            for peer in rule["from"]
            if "podSelector" in peer
        ]
        for each in workloads:
            assert any(selects(selector, each.labels) for selector in admitted), each
        assert not any(selects(selector, {"gazette-client": "true"}) for selector in admitted)


def test_rules_and_dashboards_are_those_of_this_repository():
    objects = objects_of(text_of("production"))
    [rules] = named(objects, "PrometheusRule")
    written = [yaml.safe_load((ROOT / "monitoring" / each).read_text()) for each in RULES]
    assert rules["spec"]["groups"] == [group for each in written for group in each["groups"]]
    [boards] = named(objects, "ConfigMap")
    assert boards["metadata"]["labels"]["grafana_dashboard"] == "1"
    files = {path.name: path.read_text() for path in (ROOT / "monitoring/dashboards").iterdir()}
    assert boards["data"] == files
    assert sum(map(len, files.values())) < CONFIG_MAP_BYTES_MAX


def test_sets_cover_what_the_chart_can_do():
    kinds = {each["kind"] for name in SETS for each in objects_of(text_of(name))}
    assert kinds >= {"Ingress", "CronJob", "Deployment", "NetworkPolicy", *FOREIGN}
    assert DEPLOY / "kubernetes" == RENDER.TARGET

"""Upgrade of the chart at a real API server: nothing is made anew, and nothing is refused."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from gazette_sdk import __version__
from support.deployments import objects_of, script, workloads_of
from support.kubernetes_api import KubernetesApi, RefusedError, running_api

RENDER = script("render-manifests")
SETS = RENDER.sets()
API_SERVER = RENDER.tool("kube-apiserver")

LAST_RELEASE = Path(__file__).with_name("last-release")
EARLIER_VERSION = "0.0.9"
"""Version that replaces this tree's in the last release: images and labels differ."""

FOREIGN = {"Certificate", "PodMonitor", "PrometheusRule"}
"""Kinds of other projects, which this server does not know."""

pytestmark = pytest.mark.skipif(
    API_SERVER is None, reason="kube-apiserver is not here: scripts/kube-tools"
)


@pytest.fixture(scope="module")
def api(tmp_path_factory) -> KubernetesApi:
    """API server with the namespace of each set."""
    with running_api(API_SERVER, tmp_path_factory.mktemp("kubernetes")) as server:
        for name in SETS:
            [namespace] = objects_of((RENDER.TARGET / name / "namespace.yaml").read_text())
            namespace["metadata"]["name"] = name
            labels = namespace["metadata"]["labels"]
            # Pods are refused; objects that make pods which would be refused have a warning.
            labels["pod-security.kubernetes.io/warn"] = "restricted"
            server.apply(namespace, name)
        yield server


def today(name: str) -> list[dict]:
    """Return the objects of a set that this server knows."""
    text = (RENDER.TARGET / name / "gazette.yaml").read_text()
    return [_in_namespace(each, name) for each in objects_of(text) if each["kind"] not in FOREIGN]


def earlier(name: str) -> list[dict]:
    """Return the objects of a set as of the last release."""
    text = (LAST_RELEASE / f"{name}.yaml").read_text().replace(__version__, EARLIER_VERSION)
    return [_in_namespace(each, name) for each in objects_of(text) if each["kind"] not in FOREIGN]


def _in_namespace(item: dict, name: str) -> dict:
    item["metadata"]["namespace"] = name
    return item


def pods_of(objects: list[dict]) -> list[dict]:
    """Return a pod of each object that makes pods, with its claims, as a controller makes it."""
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": each.source["metadata"]["name"], "labels": each.labels},
            "spec": each.pod
            | {
                "volumes": [
                    *each.pod.get("volumes", []),
                    *(
                        {
                            "name": claim["metadata"]["name"],
                            "persistentVolumeClaim": {"claimName": claim["metadata"]["name"]},
                        }
                        for claim in each.source["spec"].get("volumeClaimTemplates", [])
                    ),
                ]
            },
        }
        for each in workloads_of(objects)
    ]


def identity(item: dict) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def broker_set(name: str) -> dict:
    """Return the set of brokers of a set."""
    return next(
        each.source
        for each in workloads_of(today(name))
        if each.component == "broker" and each.source["kind"] == "StatefulSet"
    )


@pytest.mark.parametrize("name", SETS)
def test_todays_chart_is_applied_over_the_last_release_and_makes_no_object_anew(api, name):
    before = {identity(each): api.apply(each, name) for each in earlier(name)}
    after = {identity(each): api.apply(each, name) for each in today(name)}
    for each, answer in after.items():
        assert not answer.warnings, (each, answer.warnings)
    kept = {each for each in before if each[0] not in {"ConfigMap", "NetworkPolicy"}}
    assert kept <= set(after), "an upgrade removes these, and what they hold"
    updated = set()
    for each in before.keys() & after.keys():
        old, new = before[each].content["metadata"], after[each].content["metadata"]
        assert new["uid"] == old["uid"], each
        if new.get("generation", 0) > old.get("generation", 0):
            updated.add(each)
    brokers = [each for each in workloads_of(today(name)) if each.component == "broker"]
    assert brokers
    assert {identity(each.source) for each in brokers} <= updated, "their image is another one"


@pytest.mark.parametrize("name", SETS)
def test_every_pod_is_admitted_where_the_restricted_standard_is_enforced(api, name):
    for pod in pods_of(today(name)):
        answer = api.try_to_create(pod, name)
        assert not answer.warnings, (pod["metadata"]["name"], answer.warnings)


def test_a_pod_that_may_become_root_is_refused(api):
    [pod, *_] = pods_of([broker_set("production")])
    pod["spec"]["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(RefusedError, match='violates PodSecurity \\\\"restricted:latest'):
        api.try_to_create(pod, "production")


def test_a_change_of_a_field_that_cannot_change_is_refused(api):
    brokers = broker_set("production")
    api.apply(brokers, "production")
    changed = copy.deepcopy(brokers)
    claims = changed["spec"]["volumeClaimTemplates"]
    claims[0]["spec"]["resources"]["requests"]["storage"] = "1Gi"
    with pytest.raises(RefusedError, match="updates to statefulset spec for fields other than"):
        api.apply(changed, "production")
    api.apply(brokers, "production")


def test_a_misspelled_field_is_refused(api):
    brokers = broker_set("production")
    brokers["spec"]["template"]["spec"]["terminationGraceSeconds"] = 600
    with pytest.raises(RefusedError, match="terminationGraceSeconds"):
        api.apply(brokers, "production")

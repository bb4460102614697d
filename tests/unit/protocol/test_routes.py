from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol import rules as routes
from support.vectors import build, cases, header, refuses, route


@pytest.mark.parametrize("case", cases("broker", "process_id"))
def test_process_ids_follow_the_vectors(case):
    with refuses(case["expect"]):
        routes.validate_process_id(build(pb.ProcessSpec.ID, case["input"]))


@pytest.mark.parametrize("case", cases("broker", "broker_spec"))
def test_broker_specs_follow_the_vectors(case):
    given = case["input"]
    spec = pb.BrokerSpec(
        process_spec=pb.ProcessSpec(
            id=build(pb.ProcessSpec.ID, given["id"]), endpoint=given["endpoint"]
        ),
        journal_limit=given["journal_limit"],
    )
    with refuses(case["expect"]):
        routes.validate_broker_spec(spec)


@pytest.mark.parametrize("case", cases("broker", "route_validate"))
def test_routes_follow_the_vectors(case):
    with refuses(case["expect"]):
        routes.validate_route(route(case["input"]))


@pytest.mark.parametrize("case", cases("broker", "route_equivalent"))
def test_equivalence_follows_the_vectors(case):
    assert routes.equivalent(route(case["a"]), route(case["b"])) == case["expect"]
    assert routes.equivalent(route(case["b"]), route(case["a"])) == case["expect"]


@pytest.mark.parametrize("case", cases("broker", "route_from_assignments"))
def test_routes_of_assignments_follow_the_vectors(case):
    made = routes.route_of((a["zone"], a["suffix"], a["slot"]) for a in case["assignments"])
    assert made == route(case["expect"])


def test_two_assignments_of_one_member_are_one_member():
    made = routes.route_of([("a", "one", 1), ("a", "two", 0), ("a", "two", 2), ("b", "one", 3)])
    assert [f"{m.zone}/{m.suffix}" for m in made.members] == ["a/one", "a/two", "b/one"]
    assert made.primary == 1


@pytest.mark.parametrize("case", cases("broker", "route_attach_endpoints"))
def test_attached_endpoints_follow_the_vectors(case):
    given = route({"members": case["members"], "endpoints": ["old"]})
    routes.attach_endpoints(given, lambda zone, suffix: case["known"].get(f"{zone}#{suffix}"))
    assert list(given.endpoints) == case["expect"]


def test_a_route_of_no_members_has_no_endpoints():
    given = routes.route_of([])
    routes.attach_endpoints(given, lambda zone, suffix: "http://x")
    assert given == pb.Route(primary=-1)


@pytest.mark.parametrize("case", cases("broker", "header_validate"))
def test_headers_follow_the_vectors(case):
    with refuses(case["expect"]):
        if case["kind"] == "etcd":
            routes.validate_etcd(build(pb.Header.Etcd, case["input"]))
        else:
            routes.validate_header(header(case["input"]))


@pytest.mark.parametrize("case", cases("broker", "unrouted_header"))
def test_unrouted_headers_follow_the_vectors(case):
    etcd = build(pb.Header.Etcd, case["keyspace_etcd"])
    made = routes.unrouted_header(build(pb.ProcessSpec.ID, case["local_member"]), etcd)
    assert made == header(case["expect"])
    routes.validate_header(made)
    gone = routes.unrouted_header(None, etcd)
    assert gone.HasField("process_id")
    routes.validate_header(gone)


@pytest.mark.parametrize(
    ("given", "kind", "path"),
    [
        (
            {"members": [{"zone": "b", "suffix": "aaaa"}, {"zone": "a", "suffix": "bbbb"}]},
            "not_sorted_unique",
            "",
        ),
        (
            {"members": [{"zone": "a", "suffix": "aaaa"}], "endpoints": ["http://a", "http://b"]},
            "endpoints_length",
            "",
        ),
        (
            {"members": [{"zone": "a", "suffix": "aaaa"}], "endpoints": ["http:///x"]},
            "missing_host",
            "Endpoints[0]",
        ),
        ({"members": [{"zone": "a", "suffix": "aa"}]}, "invalid_length", "Members[0].Suffix"),
        ({}, "invalid_primary", ""),
    ],
)
def test_bad_routes_are_refused(given, kind, path):
    with pytest.raises(ValidationError) as caught:
        routes.validate_route(route(given))
    assert (caught.value.kind, caught.value.path) == (kind, path)


def test_a_header_with_half_a_process_id_is_refused():
    with pytest.raises(ValidationError) as caught:
        routes.validate_header(header({"process_id": {"zone": "a"}}), "Header")
    assert (caught.value.kind, caught.value.path) == ("invalid_length", "Header.ProcessId.Suffix")


def test_an_endpoint_of_a_broker_is_checked_after_its_id():
    spec = pb.BrokerSpec(process_spec={"id": {"zone": "a", "suffix": "aaaa"}, "endpoint": "x"})
    with pytest.raises(ValidationError) as caught:
        routes.validate_broker_spec(spec)
    assert (caught.value.kind, caught.value.path) == ("not_absolute", "Endpoint")

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY, generate_latest

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment import open_store
from support.stores import put_bytes
from support.vectors import golden


def recorded():
    """The store metrics of the recording, by name."""
    found = {}

    def look(value):
        if isinstance(value, dict):
            for key, item in value.items():
                if key.startswith("gazette_store_") and isinstance(item, dict):
                    found[key] = item
                look(item)
        elif isinstance(value, list):
            for item in value:
                look(item)

    look(golden("broker/debug_endpoints.json"))
    return found


def test_operations_are_counted_under_the_recorded_names_labels_and_buckets():
    store = open_store("memory://metrics/")
    put_bytes(store, "a", b"12345", "gzip")
    put_bytes(store, "b", b"123")
    assert store.exists("a")
    assert not store.exists("c")
    assert len(list(store.list(""))) == 2
    with pytest.raises(StoreError):
        store.open("c")
    next(store.list(""))  # a consumer that had enough

    def value(name, **labels):
        return REGISTRY.get_sample_value(name, {"store": store.url, **labels})

    count = "gazette_store_operation_total"
    assert value(count, operation="put", status="success") == 2
    assert value(count, operation="exists", status="success") == 2
    assert value(count, operation="get", status="error") == 1
    assert value("gazette_store_put_bytes_total", encoding="gzip") == 5
    assert value("gazette_store_put_bytes_total", encoding="none") == 3
    assert value("gazette_store_list_items_count_sum") == 2
    seconds = "gazette_store_operation_duration_seconds_count"
    assert value(seconds, operation="put", status="success") == 2

    lines = generate_latest().decode().splitlines()
    expected = recorded()
    assert len(expected) == 6
    for name, kind in expected.items():
        assert f"# TYPE {name} {kind['type']}" in lines, name
        if "buckets" in kind:
            bounds = [
                line.partition('le="')[2].partition('"')[0]
                for line in lines
                if line.startswith(f"{name}_bucket") and "metrics" in line
            ]
            assert sorted({float(b) for b in bounds}) == [float(b) for b in kind["buckets"]]

"""A store with injected faults: what each fault does, and that a seed decides them all."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time

import pytest

from gazette_sdk.errors import (
    ConfigurationError,
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
)
from gazette_sdk.fragment import StoreRegistry, check_store, open_store
from gazette_sdk.testing.store_faults import (
    FaultyStore,
    InjectedFault,
    StoreFaultInjector,
    StoreFaults,
    save_store_faults,
)

PATH = "a/journal/fragment.raw"


@pytest.fixture
def plain(tmp_path):
    return open_store("file:///", file_root=tmp_path)


def put(store, path=PATH, content=b"content", **more):
    store.put(path, io.BytesIO(content), len(content), **more)


def read(store, path=PATH):
    with store.open(path).raw as raw:
        return raw.read()


def faulty(plain, *, seed=0, **faults):
    injector = StoreFaultInjector(StoreFaults(**faults), seed=seed)
    return injector.wrap(plain), injector


def outcomes(plain, seed):
    store, injector = faulty(
        plain, seed=seed, errors_before=0.3, errors_after=0.3, partial_uploads=0.3, broken_reads=0.3
    )
    for number in range(30):
        for operate in (
            lambda: put(store, f"j/{number}"),  # noqa: B023 - called at once
            lambda: read(store, f"j/{number}"),  # noqa: B023
            lambda: list(store.list("j/")),
        ):
            with contextlib.suppress(StoreError, ConnectionError):
                operate()
    return list(injector.injected)


def test_the_same_seed_injects_the_same_faults_and_another_one_does_not(plain, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    first = outcomes(plain, 7)
    again = outcomes(open_store("file:///", file_root=other), 7)
    assert first == again
    assert {each.fault for each in first} == {
        "errors_before",
        "errors_after",
        "partial_uploads",
        "broken_reads",
    }
    other = tmp_path / "third"
    other.mkdir()
    assert outcomes(open_store("file:///", file_root=other), 8) != first


def test_threads_get_the_same_faults_in_any_order(plain):
    def injected():
        store, injector = faulty(plain, seed=3, errors_before=0.5)

        def operate(name):
            for _ in range(20):
                with contextlib.suppress(StoreError):
                    store.exists(name)

        threads = [threading.Thread(target=operate, args=(str(n),)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(injector.injected, key=lambda each: each.key)

    assert injected() == injected()


def test_without_faults_it_is_the_other_store(plain):
    store, injector = faulty(plain)
    put(store)
    assert store.exists(PATH)
    assert read(store) == b"content"
    assert [found.path for found in store.list("a/")] == ["journal/fragment.raw"]
    assert store.sign_get(PATH, 60) == plain.sign_get(PATH, 60)
    check_store(store)
    store.remove(PATH)
    with pytest.raises(FragmentNotFoundError):
        store.open(PATH)
    assert not injector.injected
    assert store.url == plain.url


def test_an_opened_object_can_be_read_from_its_middle(plain):
    store, _ = faulty(plain)
    put(store, content=b"0123456789")
    with store.open(PATH).raw as raw:
        raw.seek(4)
        assert raw.read(3) == b"456"
        assert raw.tell() == 7


def test_an_error_before_leaves_no_effect(plain):
    store, injector = faulty(plain, errors_before=1.0)
    with pytest.raises(StoreError, match="injected: put failed, without an effect"):
        put(store)
    assert not plain.exists(PATH)
    assert list(injector.injected) == [InjectedFault("put", PATH, "errors_before")]


def test_an_error_after_leaves_the_effect(plain):
    store, _ = faulty(plain, errors_after=1.0)
    with pytest.raises(StoreError, match="after its effect"):
        put(store)
    assert read(plain) == b"content"
    with pytest.raises(StoreError, match="after its effect"):
        store.remove(PATH)
    assert not plain.exists(PATH)


def test_a_partial_upload_fails_and_stores_nothing(plain, tmp_path):
    store, _ = faulty(plain, partial_uploads=1.0)
    with pytest.raises(StoreError, match="broke off"):
        put(store, content=os.urandom(100_000))
    assert list(plain.list("")) == []
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_partial_upload_of_an_object_that_exists_fails_too(plain):
    put(plain)
    store, _ = faulty(plain, partial_uploads=1.0)
    with pytest.raises(StoreError, match="broke off"):
        put(store)
    assert read(plain) == b"content"


@pytest.mark.parametrize(("fault", "least"), [("torn_uploads", 1), ("empty_uploads", 0)])
def test_a_torn_upload_succeeds_and_stores_a_part(plain, fault, least):
    store, injector = faulty(plain, **{fault: 1.0}, seed=2)
    put(store, content=os.urandom(1000))
    assert store.exists(PATH)
    assert store.status(PATH).length == len(read(plain))
    assert least <= len(read(plain)) < (1000 if least else 1)
    assert [each.fault for each in injector.injected] == [fault]


def test_a_broken_read_delivers_a_part_and_fails(plain):
    content = os.urandom(100_000)
    put(plain, content=content)
    store, _ = faulty(plain, broken_reads=1.0, seed=2)
    got = bytearray()

    def read_on(raw):
        while data := raw.read(1000):
            got.extend(data)

    with store.open(PATH).raw as raw, pytest.raises(ConnectionError, match="broke off"):
        read_on(raw)
    assert 0 < len(got) < len(content)
    assert content.startswith(got)


def test_listings_lag_behind_writes(plain):
    now = time.time()
    injector = StoreFaultInjector(StoreFaults(list_lag_s=30.0), clock=lambda: now)
    store = injector.wrap(plain)
    put(store)
    assert list(store.list("")) == []
    assert store.exists(PATH)
    now += 32
    assert [found.path for found in store.list("")] == [PATH]


def test_latency_is_within_its_bounds_and_ends_with_the_time_limit(plain):
    slept = []
    injector = StoreFaultInjector(StoreFaults(latency_s=(0.2, 0.4)), sleep=slept.append)
    store = injector.wrap(plain)
    for _ in range(20):
        store.exists(PATH)
    assert len(slept) == 20
    assert all(0.2 <= each <= 0.4 for each in slept)
    with store.bounded(0.1):
        store.exists(PATH)
    assert slept[-1] <= 0.1


def test_revoked_credentials_are_an_authorization_error_until_healed(plain):
    store, injector = faulty(plain)
    injector.revoke()
    with pytest.raises(StoreAuthorizationError, match="revoked") as caught:
        put(store)
    assert store.is_authorization_error(caught.value)
    injector.heal()
    put(store)


def test_an_unreachable_store_fails_every_operation_and_open_objects(plain):
    store, injector = faulty(plain)
    put(store)
    with store.open(PATH).raw as raw:
        injector.fail()
        with pytest.raises(ConnectionError, match="unreachable"):
            raw.read()
    for operate in (
        lambda: store.exists(PATH),
        lambda: read(store),
        lambda: list(store.list("")),
        lambda: store.sign_get(PATH, 60),
        lambda: store.remove(PATH),
    ):
        with pytest.raises(StoreError, match="unreachable"):
            operate()
    injector.heal()
    assert read(store) == b"content"


def test_a_hanging_store_answers_when_it_is_healed_or_fails_at_its_limit(plain):
    store, injector = faulty(plain)
    injector.hang()
    with store.bounded(0.05), pytest.raises(StoreError, match="in time"):
        put(store)
    thread = threading.Thread(target=put, args=(store,))
    thread.start()
    assert thread.is_alive()
    injector.heal()
    thread.join(30)
    assert read(plain) == b"content"


def test_only_the_named_operations_are_affected(plain):
    store, _ = faulty(plain, unreachable=True, operations=("put",))
    assert not store.exists(PATH)
    with pytest.raises(StoreError, match="unreachable"):
        put(store)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"errors_before": 1.5}, "errors_before=1.5"),
        ({"latency_s": (2.0, 1.0)}, "least and the greatest"),
        ({"operations": ("upload",)}, "no upload"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ConfigurationError, match=text):
        StoreFaults(**settings)


def test_installed_faults_wrap_what_is_opened_meanwhile(tmp_path):
    injector = StoreFaultInjector()
    before = open_store("memory://before/")
    with injector.installed():
        stores = StoreRegistry(tmp_path)
        store = stores.get("file:///")
    assert isinstance(store, FaultyStore)
    assert not isinstance(before, FaultyStore)
    assert not isinstance(open_store("memory://behind/"), FaultyStore)


def test_settings_of_a_file_are_followed(plain, tmp_path):
    path = tmp_path / "faults.json"
    save_store_faults(path, StoreFaults(), seed=5)
    store = StoreFaultInjector.following(path).wrap(plain)
    put(store)
    save_store_faults(path, StoreFaults(unreachable=True), seed=5)
    with pytest.raises(StoreError, match="unreachable"):
        read(store)
    save_store_faults(path, StoreFaults(hangs=True), seed=5)
    thread = threading.Thread(target=read, args=(store,))
    thread.start()
    save_store_faults(path, StoreFaults(), seed=5)
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("text", ["", "{}", '{"seed": 1, "nothing": 2}'])
def test_a_file_without_settings_is_refused(tmp_path, text):
    path = tmp_path / "faults.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match="save_store_faults"):
        StoreFaultInjector.following(path)


PROGRAM = """
import io, pathlib, sys
from gazette_sdk.fragment import open_store
store = open_store("file:///", file_root=pathlib.Path(sys.argv[1]))
store.put("x", io.BytesIO(b"x"), 1)
"""


def test_a_program_runs_with_the_faults_of_a_file(tmp_path):
    (tmp_path / "uploading.py").write_text(PROGRAM)

    def run(**faults):
        save_store_faults(tmp_path / "faults.json", StoreFaults(**faults))
        return subprocess.run(
            [
                *(sys.executable, "-m", "gazette_sdk.testing.faulty_process"),
                *("faults.json", "uploading", str(tmp_path)),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    refused = run(revoked=True)
    assert refused.returncode == 1
    assert "injected: the credentials were revoked" in refused.stderr
    assert run().returncode == 0
    assert (tmp_path / "x").read_bytes() == b"x"

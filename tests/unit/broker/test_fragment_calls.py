from __future__ import annotations

import asyncio
import math
from types import SimpleNamespace

import pytest

from gazette_sdk.broker.fragments.index import Index
from gazette_sdk.broker.listing import SIGNATURE_TTL_MAX_S, check_store, list_page
from gazette_sdk.errors import ValidationError
from gazette_sdk.fragment.content import CoverSet
from gazette_sdk.fragment.registry import StoreRegistry
from gazette_sdk.fragment.stores import FileStore, open_store
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, Claims
from gazette_sdk.protocol.durations import from_ns, from_seconds
from gazette_sdk.protocol.rules import validate
from support.vectors import cases

EVERYTHING = Claims(int(Capability.ALL), pb.LabelSelector(), math.inf)


def index_of(case):
    index = Index()
    fragments = [
        pb.Fragment(
            journal="a/journal",
            compression_codec=pb.NONE,
            backing_store="file:///store/" if entry["mod_time"] else "",
            **entry,
        )
        for entry in case["fragments"]
    ]
    index.replace_remote(CoverSet(fragments))
    return index, fragments


@pytest.mark.parametrize("case", cases("broker", "list_fragments"))
def test_pages(case, tmp_path):
    async def scenario():
        index, fragments = index_of(case)
        request = pb.FragmentsRequest(journal="a/journal", **case["request"])
        if case.get("expect") == "validation_error":
            with pytest.raises(ValidationError):
                validate(request)
            return
        validate(request)
        stores = StoreRegistry(tmp_path)
        response = await list_page(request, index, stores)
        assert [fragments.index(entry.spec) for entry in response.fragments] == (
            case["expect_indices"]
        )
        assert response.next_page_token == case["expect_next_page_token"]
        assert not any(entry.signed_url for entry in response.fragments)

        request.signatureTTL.CopyFrom(from_ns(60 * 10**9))
        response = await list_page(request, index, stores)
        for entry in response.fragments:
            assert bool(entry.signed_url) == bool(entry.spec.backing_store)
        await stores.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("ttl_s", "is_signed"),
    [(SIGNATURE_TTL_MAX_S, True), (SIGNATURE_TTL_MAX_S + 1, False), (300_000_000_000, False)],
)
def test_urls_are_signed_for_a_week_at_most(tmp_path, ttl_s, is_signed):
    async def scenario():
        index, stores = Index(), StoreRegistry(tmp_path)
        fragment = pb.Fragment(
            journal="a/journal", end=1, compression_codec=pb.NONE, backing_store="file:///"
        )
        index.replace_remote(CoverSet([fragment]))
        request = pb.FragmentsRequest(journal="a/journal", signatureTTL=from_seconds(ttl_s))
        validate(request)
        try:
            if is_signed:
                page = await list_page(request, index, stores)
                assert page.fragments[0].signed_url
            else:
                with pytest.raises(ValidationError, match="expected <= 168h0m0s"):
                    await list_page(request, index, stores)
        finally:
            await stores.aclose()

    asyncio.run(scenario())


def test_a_page_waits_for_the_first_listing(tmp_path):
    async def scenario():
        index, stores = Index(), StoreRegistry(tmp_path)
        page = asyncio.create_task(
            list_page(pb.FragmentsRequest(journal="a/journal"), index, stores)
        )
        await asyncio.sleep(0)
        assert not page.done()
        index.replace_remote(CoverSet())
        assert (await asyncio.wait_for(page, 5)).status == pb.OK
        await stores.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("option", ["do_not_wait", "unstored_only"])
def test_a_page_that_must_not_wait_has_what_is_known(tmp_path, option):
    async def scenario():
        index, stores = Index(), StoreRegistry(tmp_path)
        local = pb.Fragment(journal="a/journal", end=7)
        index.commit(local, SimpleNamespace())
        request = pb.FragmentsRequest(journal="a/journal", **{option: True})
        page = await asyncio.wait_for(list_page(request, index, stores), 5)
        assert [entry.spec for entry in page.fragments] == [local]
        await stores.aclose()

    asyncio.run(scenario())


class DeniesRemoval(FileStore):
    def _remove(self, key):
        raise PermissionError(13, "Permission denied")


class DeniesProbe(FileStore):
    def _put(self, key, content, length, content_encoding, overwrite):
        if "delete-probe" in key:
            raise OSError("no write")
        super()._put(key, content, length, content_encoding, overwrite)

    def _remove(self, key):
        raise AssertionError("remove is not attempted")


def health(tmp_path, url="file:///store/", kind=FileStore, **request):
    (tmp_path / "store").mkdir(exist_ok=True)

    def opener(url):
        return kind(open_store(url, file_root=tmp_path)._parsed, tmp_path)

    async def scenario():
        stores = StoreRegistry(tmp_path, opener=opener)
        try:
            return await asyncio.wait_for(
                check_store(
                    pb.FragmentStoreHealthRequest(fragment_store=url, **request),
                    stores,
                    EVERYTHING,
                    [],
                ),
                20,
            )
        finally:
            await stores.aclose()

    return asyncio.run(scenario())


def test_a_healthy_store_is_ok_and_the_delete_probe_leaves_nothing(tmp_path):
    assert health(tmp_path).status == pb.OK
    for prefix in ("", "recovery/"):
        response = health(tmp_path, check_delete=True, check_delete_prefix=prefix)
        assert (response.status, response.store_health_error) == (pb.OK, "")
        assert not list(tmp_path.rglob("*delete-probe*"))


def test_a_store_that_denies_removal_is_healthy_unless_that_is_asked_for(tmp_path):
    assert health(tmp_path, kind=DeniesRemoval).status == pb.OK
    response = health(tmp_path, kind=DeniesRemoval, check_delete=True, check_delete_prefix="r/")
    assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert "remove" in response.store_health_error


def test_a_delete_probe_that_cannot_be_put_names_the_step(tmp_path):
    response = health(tmp_path, kind=DeniesProbe, check_delete=True)
    assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert "put" in response.store_health_error
    assert "no write" in response.store_health_error


def test_a_store_that_cannot_be_made_is_unhealthy_with_a_reason(tmp_path):
    response = health(tmp_path, url="s3://bucket/?unknown=argument", check_delete=True)
    assert response.status == pb.FRAGMENT_STORE_UNHEALTHY
    assert "unknown" in response.store_health_error

"""Changes of the cluster by the console: for those who may, once the exact name is typed."""

from __future__ import annotations

import base64
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from playwright.sync_api import expect

from gazette_sdk import Journals, Publisher, connect, mapping, shard
from gazette_sdk.embedded import EmbeddedCluster
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.authorization import Capability, authority_for
from gazette_sdk.transport.loop import run
from support.axe import serious_findings
from support.console_stand_in import sample_name

SHARD = "totals/part-003"
SHARD_PLACE = f"/shards/totals/{SHARD}"
TOPIC = "acme/orders"
LIST, APPLY, READ = 2, 4, 8


def token_of(capabilities):
    def part(value):
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"cap": capabilities, "sub": "ada", "exp": int(time.time()) + 3600}
    return f"{part({'alg': 'HS256'})}.{part(claims)}.c2ln"


def dialog_of(page, label):
    page.get_by_role("button", name=f"{label}…").click()
    dialog = page.locator("dialog[open]")
    expect(dialog).to_be_visible()
    return dialog


def button(dialog, label):
    return dialog.get_by_role("button", name=label, exact=True)


@pytest.fixture
def failed(stand_in, visit):
    """A stand-in with a failed shard, and the page of the shard."""
    cluster = stand_in(is_troubled=True)
    page = visit.open(cluster.server.endpoint, SHARD_PLACE)
    expect(page.get_by_text("KeyError").first).to_be_visible()
    return cluster, page


def test_a_failed_shard_is_unassigned_once_its_exact_name_is_typed(failed):
    cluster, page = failed
    dialog = dialog_of(page, "Unassign")
    expect(dialog).to_contain_text("b/totals-1")
    expect(dialog.locator("code")).to_contain_text(f"gazctl shards unassign -l id={SHARD} --failed")
    field = dialog.get_by_role("textbox")
    expect(field).to_be_focused()
    for wrong in ("", "totals/part-00", SHARD.upper(), f"{SHARD} ", "totals/part-004"):
        field.fill(wrong)
        expect(button(dialog, "Unassign")).to_be_disabled()
        field.press("Enter")
    assert cluster.world.changes == []
    field.fill(SHARD)
    button(dialog, "Unassign").click()
    expect(page.locator(".change").get_by_text(f"{SHARD} was unassigned")).to_be_visible()
    expect(dialog).not_to_be_visible()
    assert cluster.world.changes == [
        ("/v1/at/a/totals-0/shards/unassign", {"shards": [SHARD], "onlyFailed": True})
    ]
    expect(page.locator("main").get_by_text("KeyError")).to_have_count(0)
    expect(page.get_by_role("button", name="Unassign…")).to_have_count(0)


def test_a_shard_that_runs_and_a_page_say_why_a_skip_is_a_command(failed, visit):
    cluster, page = failed
    expect(page.get_by_text("Skipping is a command, because")).to_be_visible()
    expect(page.get_by_text("gazctl shards skip totals/part-003")).to_be_visible()
    page = visit.open(cluster.server.endpoint, "/shards/totals/totals/part-001")
    expect(page.get_by_text("primary").first).to_be_visible()
    assert page.get_by_role("button", name="Unassign…").count() == 0


def test_partitions_are_created_like_the_last_one(stand_in, visit):
    cluster = stand_in(journals=24)
    page = visit.open(cluster.server.endpoint, "/journals")
    dialog = dialog_of(page, "Create partitions")
    create = button(dialog, "Create partitions")
    name = dialog.get_by_label("Type the name of the topic")
    for wrong in ("acme/order", "acme/orders/", "acme", "acme/orders/part-000"):
        name.fill(wrong)
        expect(dialog.get_by_text(f"There is no journal {wrong}/part-000")).to_be_visible()
        expect(create).to_be_disabled()
    name.fill(TOPIC)
    names = dialog.get_by_label("New journals").get_by_role("listitem")
    expect(names).to_have_text([f"{TOPIC}/part-004"])
    number = dialog.get_by_label("New partitions")
    for wrong in ("0", "33", ""):
        number.fill(wrong)
        expect(dialog.get_by_text("Give a number from 1 to 32")).to_be_visible()
        expect(create).to_be_disabled()
    number.fill("2")
    expect(names).to_have_text([f"{TOPIC}/part-004", f"{TOPIC}/part-005"])
    expect(dialog).to_contain_text(f"the spec of {TOPIC}/part-003")
    expect(dialog.locator("code")).to_contain_text(f"gazctl topics grow {TOPIC} --partitions 6")
    create.click()
    done = page.locator(".change").get_by_text(f"{TOPIC}/part-004 to {TOPIC}/part-005 were created")
    expect(done).to_be_visible()
    expect(page.get_by_role("link", name=f"{TOPIC}/part-005")).to_be_visible()
    [(path, body)] = cluster.world.changes
    assert path == "/v1/journals/apply"
    assert [change["expectModRevision"] for change in body["changes"]] == ["0", "0"]
    [first, second] = [change["upsert"] for change in body["changes"]]
    assert first["name"] == f"{TOPIC}/part-004"
    assert "suspend" not in first
    assert first["fragment"]["stores"] == ["s3://acme-gazette/prod/"]
    assert {**first, "name": ""} == {**second, "name": ""}


def test_names_that_exist_by_now_are_refused(stand_in, visit):
    cluster = stand_in(journals=24)
    page = visit.open(cluster.server.endpoint, "/journals")
    dialog = dialog_of(page, "Create partitions")
    dialog.get_by_label("Type the name of the topic").fill(TOPIC)
    expect(dialog.get_by_label("New journals")).to_be_visible()
    names = [sample_name(number) for number in range(24)]
    cluster.world.names = [*names, f"{TOPIC}/part-004"]  # another person was faster
    button(dialog, "Create partitions").click()
    expect(dialog.get_by_text("exists by now: nothing was created")).to_be_visible()
    expect(dialog).to_be_visible()


@pytest.mark.parametrize(
    ("capabilities", "is_shown"), [(LIST | READ, False), (LIST | READ | APPLY, True)]
)
def test_only_a_token_with_apply_sees_the_buttons(stand_in, visit, capabilities, is_shown):
    token = token_of(capabilities)
    cluster = stand_in(is_troubled=True, token=token)
    page = visit.page
    page.goto(f"{cluster.server.endpoint}/console/#token={token}")
    expect(page.get_by_text("What needs you")).to_be_visible()
    for place, label, shown in (
        ("/journals", "Create partitions", ".rows .row"),
        (SHARD_PLACE, "Unassign", "pre.problem"),
    ):
        page.evaluate("(place) => { location.hash = place; }", place)
        expect(page.locator(shown).first).to_be_visible()
        expect(page.get_by_role("button", name=f"{label}…")).to_have_count(int(is_shown))


@pytest.mark.parametrize("status", [401, 403])
def test_a_capability_that_the_server_misses_is_named(stand_in, visit, status):
    visit.expected = (str(status),)
    message = "token lacks the required capability APPLY"
    refused = {
        "/v1/at/a/totals-0/shards/unassign": (status, message),
        "/v1/journals/apply": (status, message),
    }
    cluster = stand_in(is_troubled=True, journals=24, refused=refused)
    page = visit.open(cluster.server.endpoint, SHARD_PLACE)
    dialog = dialog_of(page, "Unassign")
    dialog.get_by_role("textbox").fill(SHARD)
    button(dialog, "Unassign").click()
    expect(dialog.get_by_role("alert")).to_contain_text("Not permitted")
    expect(dialog.get_by_role("alert")).to_contain_text("capability APPLY")
    page.keyboard.press("Escape")
    page = visit.open(cluster.server.endpoint, "/journals")
    dialog = dialog_of(page, "Create partitions")
    dialog.get_by_label("Type the name of the topic").fill(TOPIC)
    button(dialog, "Create partitions").click()
    expect(dialog.get_by_role("alert")).to_contain_text("capability APPLY")
    assert cluster.world.changes == []


@pytest.mark.parametrize(
    ("place", "label", "name"),
    [("/journals", "Create partitions", TOPIC), (SHARD_PLACE, "Unassign", SHARD)],
)
def test_a_dialog_works_by_keys_and_fits_any_width_in_both_themes(
    stand_in, visit, place, label, name
):
    cluster = stand_in(is_troubled=True, journals=24)
    page = visit.open(cluster.server.endpoint, place)
    opener = page.get_by_role("button", name=f"{label}…")
    opener.focus()
    page.keyboard.press("Enter")
    dialog = page.locator("dialog[open]")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(opener).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type(name)
    expect(button(dialog, label)).to_be_enabled()
    expect(dialog.locator("code")).to_be_visible()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        assert serious_findings(page) == []
    page.set_viewport_size({"width": 320, "height": 560})
    box = dialog.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 320
    assert box["y"] + box["height"] <= 560
    assert dialog.evaluate("(each) => each.scrollWidth <= each.clientWidth")
    for _ in range(12):  # focus stays within the dialog, or in the browser's own controls
        page.keyboard.press("Tab")
        assert page.evaluate(
            "document.activeElement === document.body"
            " || Boolean(document.activeElement.closest('dialog'))"
        )
    button(dialog, label).focus()
    page.keyboard.press("Enter")
    expect(dialog).to_have_count(0)
    assert len(cluster.world.changes) == 1
    if label == "Unassign":
        expect(opener).to_have_count(0)
        expect(page.locator("main")).to_be_focused()
    else:
        expect(opener).to_be_focused()


def test_a_dialog_stays_while_the_page_is_refreshed(failed):
    cluster, page = failed
    dialog = dialog_of(page, "Unassign")
    dialog.get_by_role("textbox").fill("totals")
    with page.expect_response("**/shards/page"):
        cluster.world.is_troubled = False  # the shard has recovered by itself
    expect(page.locator("main").get_by_text("KeyError")).to_have_count(0)
    expect(dialog.get_by_role("textbox")).to_have_value("totals")
    expect(dialog.get_by_role("textbox")).to_be_focused()


# ---------------------------------------------------------------- real clusters

KEY = "c2VjcmV0c2VjcmV0"


@pytest.fixture
def audited():
    """Records of the audit log."""
    logger, found = logging.getLogger("gazette.audit"), []
    handler = logging.Handler()
    handler.emit = found.append
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


@pytest.fixture
def keyed(tmp_path):
    """A cluster with a key, whose audit log has changes, and a transport to it."""
    with EmbeddedCluster(tmp_path, sync_etcd=False, auth_keys=KEY, audited="all") as cluster:
        transport = connect(cluster.address, auth_keys=KEY)
        try:
            Journals(transport).create("orders", stores=["file:///"], codec="gzip")
            yield cluster, transport
        finally:
            run(transport.aclose(), 10)


def publish(address, message):
    """Publish a message in a thread without an event loop: Playwright has one in that of tests."""

    def publish_now():
        transport = connect(address, auth_keys=KEY)
        try:
            with Publisher(mapping=mapping.direct("orders/part-000"), transport=transport) as one:
                one.publish(message).result(10)
        finally:
            run(transport.aclose(), 10)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(publish_now).result(30)


def sign_in(page, address, *capabilities):
    mask = 0
    for each in capabilities:
        mask |= each
    token = authority_for(KEY).sign(mask, pb.LabelSelector(), 600, time.time(), subject="ada")
    page.goto("about:blank")
    page.goto(f"{address}/console/#token={token}")
    expect(page.locator(".who")).to_contain_text("ada")


def test_partitions_are_created_in_a_real_cluster_and_audited(keyed, visit, audited):
    cluster, _ = keyed
    page = visit.page
    sign_in(page, cluster.address, Capability.LIST, Capability.READ)
    page.get_by_role("link", name="Journals", exact=True).click()
    expect(page.get_by_role("link", name="orders/part-000")).to_be_visible()
    assert page.get_by_role("button", name="Create partitions…").count() == 0
    sign_in(page, cluster.address, Capability.LIST, Capability.READ, Capability.APPLY)
    page.get_by_role("link", name="Journals", exact=True).click()
    dialog = dialog_of(page, "Create partitions")
    dialog.get_by_label("Type the name of the topic").fill("orders")
    dialog.get_by_label("New partitions").fill("2")
    button(dialog, "Create partitions").click()
    page.get_by_role("link", name="orders/part-002").click()
    expect(page.locator("h1")).to_contain_text("part-002")
    page.get_by_role("tab", name="Spec").click()
    expect(page.locator("pre")).to_contain_text("compression_codec: GZIP")
    [record] = [each for each in audited if each.method == "Apply" and hasattr(each, "subject")]
    assert (record.subject, record.outcome) == ("ada", "OK")
    assert record.journal == "orders/part-001, orders/part-002"


def test_a_real_shard_is_unassigned_and_runs_again_and_that_is_audited(keyed, visit, audited):
    cluster, transport = keyed
    is_mended = threading.Event()

    def add(txn, order):
        if order["customer"] == "bad" and not is_mended.is_set():
            raise KeyError("cents")
        txn.store[order["customer"]] = 1

    totals = shard.handler(
        message=dict, store=shard.RocksStore[str, int], sources="topic=orders", name="totals"
    )(add)
    with shard.EmbeddedConsumer(
        totals, transport=transport, etcd=cluster.etcd_endpoint, auth_keys=KEY
    ) as consumer:
        publish(cluster.address, {"customer": "bad"})
        name = "totals/orders/part-000"
        page = visit.page
        capabilities = (Capability.LIST, Capability.READ, Capability.APPLY)
        sign_in(page, cluster.address, *capabilities)
        page.evaluate("(place) => { location.hash = place; }", f"/shards/totals/{name}")
        expect(page.locator("pre.problem")).to_contain_text("KeyError", timeout=40_000)
        is_mended.set()
        dialog = dialog_of(page, "Unassign")
        dialog.get_by_role("textbox").fill(name)
        button(dialog, "Unassign").click()
        expect(page.locator("pre.problem")).to_have_count(0, timeout=40_000)
        expect(page.locator(".summary")).to_contain_text("primary", timeout=40_000)
        page.get_by_role("tab", name="State").click()
        expect(page.get_by_role("cell", name='"bad"')).to_be_visible(timeout=40_000)
        assert consumer.list_shards()
    [record] = [each for each in audited if each.method == "Unassign"]
    assert (record.subject, record.outcome, record.shard) == ("ada", "OK", name)

from __future__ import annotations

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import names as urls
from support.vectors import cases, refuses


def kind_of(function, *arguments):
    with pytest.raises(ValidationError) as caught:
        function(*arguments)
    return caught.value.kind


@pytest.mark.parametrize("case", cases("broker", "fragment_store"))
def test_store_urls_follow_the_vectors(case):
    with refuses(case["expect"]):
        urls.validate_store_url(case["input"])


@pytest.mark.parametrize("case", cases("broker", "fragment_store_url"))
def test_parts_of_store_urls_follow_the_vectors(case):
    store = urls.parse_store_url(case["input"])
    assert (store.scheme, store.bucket, "/" + store.prefix) == (
        case["scheme"],
        case["host"],
        case["path"],
    )
    assert store.unknown_arguments == (case["query"],)


@pytest.mark.parametrize("case", cases("broker", "path_rewrite"))
def test_rewriting_follows_the_vectors(case):
    store = urls.parse_store_url(f"file:///{case['query']}")
    assert case["prefix"] + store.rewrite(case["path"]) == case["expect"]


@pytest.mark.parametrize("case", cases("broker", "endpoint"))
def test_endpoints_follow_the_vectors(case):
    with refuses(case["expect"]):
        urls.validate_endpoint(case["input"])


@pytest.mark.parametrize("case", cases("broker", "endpoint_dial_address"))
def test_dial_addresses_follow_the_vectors(case):
    assert urls.dial_address(case["input"]) == case["expect"]


@pytest.mark.parametrize(
    ("endpoint", "address", "tls"),
    [
        ("https://host", "host:443", True),
        ("HTTPS://host:9/", "host:9", True),
        ("http://user:secret@host", "host:80", False),
        ("http://[::1]", "[::1]:80", False),
        ("http://[::1]:8080/x", "[::1]:8080", False),
        ("tcp://host:1", "host:1", False),
        ("unix://localhost/a%20b.sock", "unix:///a b.sock", False),
    ],
)
def test_dial_addresses_default_ports_by_scheme(endpoint, address, tls):
    urls.validate_endpoint(endpoint)
    assert urls.dial_address(endpoint) == address
    assert urls.is_tls(endpoint) == tls


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a/b/", {"scheme": "s3", "bucket": "bucket", "prefix": "a/b/"}),
        ("S3://Bucket/", {"scheme": "s3", "bucket": "Bucket", "prefix": ""}),
        ("gs://bucket/a%20b/", {"scheme": "gs", "bucket": "bucket", "prefix": "a b/"}),
        ("file:///mnt/x/", {"scheme": "file", "bucket": "", "prefix": "mnt/x/"}),
        ("file:///", {"scheme": "file", "prefix": ""}),
        (
            "azure://box/p/",
            {"scheme": "azure", "bucket": "box", "container": "box", "account": "", "prefix": "p/"},
        ),
        ("az://box/p/", {"scheme": "az", "container": "box", "prefix": "p/"}),
        (
            "abfs://box@acct.dfs.core.windows.net/p/",
            {"scheme": "abfs", "container": "box", "account": "acct", "prefix": "p/"},
        ),
        (
            "azure-ad://tenant/acct/box/p/q/",
            {"tenant": "tenant", "account": "acct", "container": "box", "prefix": "p/q/"},
        ),
        ("azure-ad://tenant/acct/box/", {"bucket": "box", "prefix": ""}),
        ("memory://name/p/", {"scheme": "memory", "bucket": "name", "prefix": "p/"}),
        ("memory:///", {"scheme": "memory", "bucket": "", "prefix": ""}),
    ],
)
def test_store_urls_have_parts(url, expected):
    urls.validate_store_url(url)
    store = urls.parse_store_url(url)
    assert store.url == url
    assert {name: getattr(store, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("url", "kind"),
    [
        ("", "not_absolute"),
        ("s3:bucket/", "missing_bucket"),
        ("azure-ad://tenant", "missing_account"),
        ("azure-ad://tenant/", "missing_account"),
        ("azure-ad://tenant/acct", "missing_container"),
        ("azure-ad://tenant/acct/", "missing_container"),
        ("azure-ad://tenant/acct/box", "no_trailing_slash"),
        ("abfs:///p/", "missing_bucket"),
        ("gcs://bucket/", "invalid_scheme"),
        ("http://bucket/", "invalid_scheme"),
        ("file://host", "file_has_host"),
        ("s3://bucket/a/../b/", "traverses_outside"),
        ("file:///%2e%2E/", "traverses_outside"),
        ("file:///a%2f..%2fb/", "traverses_outside"),
        ("azure-ad://tenant/acct/box/../p/", "traverses_outside"),
        ("file:///?find=a&replace=../x", "traverses_outside"),
        ("s3://buc ket/", "url_parse"),
        ("s3://bucket/%zz/", "url_parse"),
        ("s3://bucket:port/", "url_parse"),
        ("s3://[::1/", "url_parse"),
        ("s3://bucket/\n", "url_parse"),
        (" s3://bucket/", "url_parse"),
    ],
)
def test_bad_store_urls_are_refused(url, kind):
    assert kind_of(urls.validate_store_url, url) == kind


def test_errors_of_store_urls_carry_their_path():
    with pytest.raises(ValidationError) as caught:
        urls.validate_store_url("s3://bucket", "Stores[1]")
    assert (caught.value.path, caught.value.kind) == ("Stores[1]", "no_trailing_slash")


def test_query_keys_are_case_insensitive_the_last_value_wins_and_empty_ones_do_nothing():
    store = urls.parse_store_url(
        "s3://b/?Region=eu&REGION=us&profile=&find=x&Replace=y&bogus=1&ACL=private"
    )
    assert store.arguments == {
        "region": "us",
        "find": "x",
        "replace": "y",
        "bogus": "1",
        "acl": "private",
    }
    assert store.unknown_arguments == ("bogus",)
    assert urls.parse_store_url("gs://b/?region=us").unknown_arguments == ("region",)


def test_a_rewritten_path_must_not_climb():
    assert kind_of(urls.rewrite_path, "journal", "..", "a/journal/x") == "traverses_outside"
    assert urls.rewrite_path("", "..", "a/x") == "a/x"
    assert urls.parse_store_url("file:///p/?find=a&replace=").key("a/aa") == "p//aa"


@pytest.mark.parametrize(
    "url", ["", "http://host/x?y#z", "opaque:b/%", "relative/path", "/rooted", "mailto:me"]
)
def test_urls_need_not_be_absolute(url):
    urls.validate_url(url)


@pytest.mark.parametrize(
    "url",
    [
        ":x",
        "x y:z",
        "1a:b",
        "http://a b/",
        "http://h:1x/",
        "http://h%zz/",
        "http://u|@h/",
        "http://[::1]x/",
        "http://[::1",
        "http://h/%a",
        "http://h\x7f/",
        "http://a<b/",
    ],
)
def test_what_is_no_url_is_refused(url):
    assert kind_of(urls.validate_url, url) == "url_parse"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "Max retries exceeded with url: /webhdfs/v1/a?delegation=KAA&op=OPEN (Caused by x)",
            "Max retries exceeded with url: /webhdfs/v1/a?… (Caused by x)",
        ),
        (
            "Cannot connect to 'https://b.s3.example/k?X-Amz-Signature=5f&X-Amz-Date=1': refused",
            "Cannot connect to 'https://b.s3.example/k?…': refused",
        ),
        (
            "url=URL(https://a.blob.example/c/b?sv=1&sig=x%3D)",
            "url=URL(https://a.blob.example/c/b?…)",
        ),
        ("<https://user:word@host/path>", "<https://…@host/path>"),
        ("s3://bucket/?endpoint=http://user:word@host", "s3://bucket/?endpoint=http://…@host"),
        ("store s3://bucket/prefix/?region=eu-central-1: gone", None),
        ("abfs://container@account.dfs.core.windows.net/", None),
        ("'orders/part-000' does not exist (why?); is /data/a there? Yes", None),
        ("half/a?b", None),
    ],
)
def test_texts_are_shown_without_queries_and_passwords(text, shown):
    assert urls.without_queries(text) == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a/?region=eu&profile=p", None),
        ("webhdfs://namenode:9871/a/?tls=true&user=ada", None),
        ("azure://container/a/?SV=1&sig=c2VjcmV0&find=a", "azure://container/a/?SV=…&sig=…&find=a"),
        ("s3://bucket/?endpoint=http://user:word@host", "s3://bucket/?endpoint=…"),
        ("s3://bucket/?endpoint=http%3A%2F%2Fuser%3Aword%40host", "s3://bucket/?endpoint=…"),
        ("gs://user:word@bucket/", "gs://…@bucket/"),
    ],
)
def test_store_urls_are_shown_without_secrets(url, shown):
    assert urls.parse_store_url(url).public == (url if shown is None else shown)

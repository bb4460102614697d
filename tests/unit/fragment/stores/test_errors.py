"""How each backend's errors are told apart."""

from __future__ import annotations

import sys

import pytest
from azure.core.exceptions import HttpResponseError, ResourceNotFoundError
from botocore.exceptions import ClientError

from gazette_sdk.errors import FragmentNotFoundError, StoreAuthorizationError, StoreError
from gazette_sdk.fragment import open_store
from gazette_sdk.fragment.stores.azure import AzureStore
from gazette_sdk.fragment.stores.gs import GCSError, GCSStore
from gazette_sdk.fragment.stores.s3 import S3Store
from support.vectors import cases


@pytest.fixture
def stores(tmp_path, monkeypatch):
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_ACCOUNT_KEY", "a2V5")
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    made = {
        "s3": open_store("s3://bucket/?region=us-east-1"),
        "gs": open_store("gs://bucket/"),
        "azure": open_store("azure://container/"),
        "file": open_store("file:///", file_root=tmp_path),
    }
    yield made
    for store in made.values():
        store.close()


def s3_error(code, status=0):
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(response, "PutObject")


def azure_error(code, status, kind=HttpResponseError):
    error = kind("failed")
    error.status_code, error.error_code = status, code
    return error


ERRORS = {
    ("s3", "code NoSuchBucket"): s3_error("NoSuchBucket", 404),
    ("s3", "code AccessDenied"): s3_error("AccessDenied", 403),
    ("s3", "HTTP 403"): s3_error("", 403),
    ("s3", "code InvalidAccessKeyId"): s3_error("InvalidAccessKeyId", 403),
    ("s3", "generic timeout"): TimeoutError("timeout"),
    ("gs", "bucket does not exist (library error)"): GCSError(404, "no bucket 'x'"),
    ("gs", "HTTP 403"): GCSError(403, "forbidden"),
    ("gs", "HTTP 404 'object not found'"): GCSError(404, "object not found"),
    ("gs", "HTTP 404 'bucket not found'"): GCSError(404, "The specified bucket does not exist."),
    ("gs", "HTTP 401"): GCSError(401, "unauthorized"),
    ("azure", "ContainerNotFound 404"): azure_error(
        "ContainerNotFound", 404, ResourceNotFoundError
    ),
    ("azure", "ContainerDisabled 403"): azure_error("ContainerDisabled", 403),
    ("azure", "AccountIsDisabled 403"): azure_error("AccountIsDisabled", 403),
    ("azure", "other 403"): azure_error("AuthorizationFailure", 403),
    ("azure", "HTTP 401"): azure_error("NoAuthenticationInformation", 401),
    ("azure", "generic timeout"): TimeoutError("timeout"),
    ("file", "base directory missing"): StoreAuthorizationError("no directory"),
    ("file", "other"): OSError("other"),
}


@pytest.mark.parametrize("case", cases("broker", "is_auth_error"))
def test_authorization_errors_follow_the_vectors(case, stores):
    backend, text = case["backend"], case["error"]
    if text is None:
        return  # without an error there is nothing to ask
    error = ERRORS.get((backend, text))
    if text == "wrapped permission denied":
        error = StoreError("wrapped")
        error.__cause__ = PermissionError("denied")
    assert error is not None, f"no error is known for {backend}: {text}"
    assert stores[backend].is_authorization_error(error) == case["expect"]


@pytest.mark.parametrize(
    ("backend", "error", "kind"),
    [
        ("s3", s3_error("AccessDenied", 403), StoreAuthorizationError),
        ("s3", s3_error("SignatureDoesNotMatch", 403), StoreError),
        ("gs", GCSError(404, "No such object: bucket/key"), FragmentNotFoundError),
        ("gs", GCSError(404, "Not Found"), FragmentNotFoundError),
        ("gs", GCSError(500, "oops"), StoreError),
        ("azure", azure_error("BlobNotFound", 404, ResourceNotFoundError), FragmentNotFoundError),
        ("azure", azure_error("ServerBusy", 503), StoreError),
        ("file", FileNotFoundError("x"), FragmentNotFoundError),
        ("file", PermissionError("x"), StoreAuthorizationError),
    ],
)
def test_errors_become_the_class_that_says_what_to_do(backend, error, kind, stores):
    store = stores[backend]
    found = store._translate("get", "a/path", error)
    assert type(found) is kind
    assert found.store == store.url
    for said in ("get 'a/path'", store.url, "; "):
        assert said in str(found)


@pytest.mark.parametrize(
    ("backend", "error", "again"),
    [
        ("s3", s3_error("SlowDown", 503), True),
        ("s3", s3_error("NotImplemented", 501), False),
        ("s3", s3_error("AccessDenied", 403), False),
        ("s3", ConnectionResetError(), True),
        ("gs", GCSError(503, ""), True),
        ("gs", GCSError(404, ""), False),
        ("gs", ConnectionResetError(), True),
        ("azure", azure_error("ServerBusy", 503), True),
        ("azure", azure_error("BlobNotFound", 404), False),
    ],
)
def test_only_what_may_pass_is_tried_again(backend, error, again, stores):
    assert stores[backend]._is_transient(error) is again


@pytest.mark.parametrize(
    ("url", "module", "extra"),
    [
        ("s3://bucket/?region=x", "s3fs", "s3"),
        ("gs://bucket/", "gcsfs", "gcs"),
        ("azure://container/", "adlfs", "azure"),
        ("azure-ad://tenant/account/container/", "adlfs", "azure"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_has_it(url, module, extra, monkeypatch):
    for name in ("s3", "gs", "azure"):
        monkeypatch.delitem(sys.modules, f"gazette_sdk.fragment.stores.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StoreError) as caught:
        open_store(url)
    assert repr(module) in str(caught.value)
    assert f'pip install "gazette-sdk[{extra}]"' in str(caught.value)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("s3://bucket/", "no region; add `\\?region="),
        ("s3://bucket/?profile=nobody&region=x", "profile"),
        ("s3://bucket/?nonsense=1", "have no argument 'nonsense'"),
        ("gs://bucket/?region=1", "have no argument 'region'"),
        ("azure://container/", "AZURE_ACCOUNT_NAME"),
        ("azure-ad://tenant/account/container/", "AZURE_CLIENT_ID"),
    ],
)
def test_what_a_store_lacks_is_named(url, match, monkeypatch, tmp_path):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("ACCOUNT_NAME", "ACCOUNT_KEY", "CLIENT_ID", "CLIENT_SECRET"):
        monkeypatch.delenv(f"AZURE_{name}", raising=False)
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING", raising=False)
    with pytest.raises(StoreError, match=match):
        open_store(url)


def test_the_backends_are_those_of_their_schemes(stores):
    assert isinstance(stores["s3"], S3Store)
    assert isinstance(stores["gs"], GCSStore)
    assert isinstance(stores["azure"], AzureStore)

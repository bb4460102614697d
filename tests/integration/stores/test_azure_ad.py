"""Azure with an application of a tenant: tokens, delegation keys and what they sign.

Azurite looks at a token's claims but not at its signature, so that no tenant is needed; it wants
TLS for that. It does not understand yet what clients of today sign with a delegation key, so that
the URL is only looked at.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import ipaddress
import time
from datetime import UTC, datetime, timedelta
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest
from azure.core.credentials import AccessToken
from azure.storage.blob.aio import BlobServiceClient
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gazette_sdk.cluster.child_process import reserve_port
from gazette_sdk.errors import StoreAuthorizationError, StoreError
from gazette_sdk.fragment import check_delete, list_fragments, open_fragment, open_store
from gazette_sdk.fragment.stores.azure import AzureADStore
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.fragments import content_path, sum_of
from support.services import azurite_command, running
from support.stores import AZURITE_ACCOUNT, put_bytes, unsigned_token

TENANT = "ab1f708d-50f6-404c-a006-d71b2ac7a606"


class Token:
    """A credential whose tokens say what Azurite wants to hear."""

    fetched = 0

    async def get_token(self, *_scopes, **_options):
        self.fetched += 1
        now = int(time.time())
        claims = {
            "aud": "https://storage.azure.com",
            "iss": f"https://sts.windows.net/{TENANT}/",
            "iat": now,
            "nbf": now - 5,
            "exp": now + 3600,
            "oid": "23657296-5cd5-45b0-a809-d972a7f4dfe1",
            "tid": TENANT,
            "ver": "1.0",
        }
        return AccessToken(unsigned_token(**claims), now + 3600)

    async def close(self):
        pass


@pytest.fixture(scope="module")
def tls_files(tmp_path_factory):
    """A certificate for the loopback address, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (directory / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return directory / "cert.pem", directory / "key.pem"


@pytest.fixture(scope="module")
def azure_tls(tmp_path_factory, tls_files):
    port, directory = reserve_port(), tmp_path_factory.mktemp("azurite-tls")
    certificate, key = tls_files
    command = azurite_command(
        port, directory, "--oauth", "basic", "--cert", str(certificate), "--key", str(key)
    )
    with running(command, port, directory / "log") as service:
        yield service


@pytest.fixture
def store(azure_tls, tls_files, monkeypatch):
    """A store of an application; its service client is pointed at Azurite."""
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "secret")
    made = open_store(f"azure-ad://{TENANT}/{AZURITE_ACCOUNT}/container/some/prefix/")
    assert isinstance(made, AzureADStore)
    made._call(made._service.close)
    made._service = BlobServiceClient(
        f"https://{azure_tls.address}/{AZURITE_ACCOUNT}",
        credential=Token(),
        connection_verify=str(tls_files[0]),
    )
    yield made
    made.close()


def test_an_application_stores_lists_reads_signs_and_removes(store):
    with pytest.raises(StoreAuthorizationError, match="roles Storage Blob Data Contributor"):
        put_bytes(store, "a", b"x")
    store._call(lambda: store._service.create_container("container"))

    content = b"content of a fragment"
    fragment = pb.Fragment(
        journal="a/journal",
        end=len(content),
        sum=sum_of(hashlib.sha1(content).digest()),
        compression_codec=pb.NONE,
    )
    put_bytes(store, content_path(fragment), content)
    put_bytes(store, content_path(fragment), b"something else")
    (listed,) = list_fragments(store, "a/journal")
    with open_fragment(store, listed, 0) as reader:
        assert reader.read() == content
    check_delete(store, "a/journal/")

    url = urlsplit(store.sign_get(content_path(fragment), 60))
    assert url.scheme == "https"
    assert unquote(url.path).endswith(f"/container/some/prefix/{content_path(fragment)}")
    query = dict(parse_qsl(url.query))
    key = store._delegation_key()
    assert (query["sp"], query["spr"]) == ("r", "https")
    assert (query["skoid"], query["sktid"]) == (key.signed_oid, key.signed_tid)
    expires = datetime.fromisoformat(query["se"]) - datetime.now(UTC)
    assert timedelta(seconds=30) < expires < timedelta(seconds=90)


def test_a_delegation_key_is_kept_until_half_of_its_life_is_over(store):
    first = store._delegation_key()
    assert store._delegation_key() is first
    store._renew_at = time.monotonic() - 1
    assert store._delegation_key() is not first


def test_a_tenant_that_cannot_be_reached_is_a_clear_error(store, monkeypatch):
    class Unreachable(Token):
        async def get_token(self, *_scopes, **_options):
            raise OSError("no route to the tenant")

    store._call(store._service.close)
    store._service = BlobServiceClient("https://127.0.0.1:1/a", credential=Unreachable())
    with pytest.raises(StoreError, match="no route to the tenant; check the network, the URL's"):
        store.put("a", io.BytesIO(b"x"), 1)
    with contextlib.suppress(StoreError):
        store.sign_get("a", 60)

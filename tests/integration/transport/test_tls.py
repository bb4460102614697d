"""GrpcTransport under TLS, with and without a certificate of the client's own."""

from __future__ import annotations

import datetime as dt

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gazette_sdk.errors import ConfigurationError, UnavailableError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.transport.grpc import GrpcTransport
from gazette_sdk.transport.wire import Tls
from support.scripted_broker import ScriptedBroker, header, in_loop


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A certificate for localhost that signs itself, and its key, as files."""
    directory = tmp_path_factory.mktemp("tls")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    (directory / "cert.pem").write_bytes(certificate.public_bytes(encoding))
    (directory / "key.pem").write_bytes(
        key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return directory


def server_credentials(pem, *, require_client=False):
    key, certificate = (pem / "key.pem").read_bytes(), (pem / "cert.pem").read_bytes()
    return grpc.ssl_server_credentials(
        [(key, certificate)],
        root_certificates=certificate if require_client else None,
        require_client_auth=require_client,
    )


@in_loop
async def test_a_trusted_server_is_spoken_to_under_tls(pem):
    tls = Tls(trusted_ca_file=str(pem / "cert.pem"))
    async with ScriptedBroker(credentials=server_credentials(pem)) as broker:
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        assert broker.address.startswith("https://")
        async with GrpcTransport(broker.address, tls=tls) as transport:
            assert (await transport.apply(pb.ApplyRequest())).header == header()
        async with GrpcTransport(broker.address, connect_timeout_s=0.5) as untrusting:
            with pytest.raises(UnavailableError):
                await untrusting.apply(pb.ApplyRequest())


@in_loop
async def test_a_client_certificate_is_presented_where_it_is_given(pem):
    authority, key = str(pem / "cert.pem"), str(pem / "key.pem")
    credentials = server_credentials(pem, require_client=True)
    async with ScriptedBroker(credentials=credentials) as broker:
        broker.on_apply = lambda _: pb.ApplyResponse(header=header())
        tls = Tls(trusted_ca_file=authority, cert_file=authority, cert_key_file=key)
        async with GrpcTransport(broker.address, tls=tls) as transport:
            await transport.apply(pb.ApplyRequest())
        tls = Tls(trusted_ca_file=authority)
        async with GrpcTransport(broker.address, tls=tls, connect_timeout_s=0.5) as nameless:
            with pytest.raises(UnavailableError):
                await nameless.apply(pb.ApplyRequest())


@in_loop
async def test_a_missing_file_is_named():
    tls = Tls(trusted_ca_file="/absent/ca.pem")
    async with GrpcTransport("https://localhost:1", tls=tls) as transport:
        with pytest.raises(ConfigurationError, match=r"/absent/ca\.pem"):
            await transport.apply(pb.ApplyRequest())

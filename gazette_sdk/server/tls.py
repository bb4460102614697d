"""TLS of a server's public port (operations section 1)."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

from gazette_sdk.errors import ConfigurationError

__all__ = ["reload_certificates", "server_context"]


def server_context(
    cert_file: str,
    key_file: str,
    ca_file: str = "",
    *,
    alpn: Sequence[str] = ("gzt/1", "http/1.1", "h2"),
) -> ssl.SSLContext:
    """Return the TLS context of a server.

    Args:
        cert_file: PEM file with the server's certificate chain.
        key_file: PEM file with its key; empty if ``cert_file`` has the key.
        ca_file: PEM file of authorities. If given, clients must present a certificate that one
            of them signed.
        alpn: protocols to offer, the preferred first. Browsers and curl offer several and get
            HTTP/1.1; gRPC clients offer ``h2`` only, stream clients ``gzt/1``.

    Raises:
        ConfigurationError: a file is missing, unreadable or of another kind.
    """
    for name, path in (
        ("server-cert-file", cert_file),
        ("server-cert-key-file", key_file),
        ("server-ca-file", ca_file),
    ):
        if path and not Path(path).is_file():
            raise ConfigurationError(f"{name}: there is no file {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(alpn))
    try:
        context.load_cert_chain(cert_file, key_file or None)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"the certificate {cert_file} and the key {key_file or cert_file} cannot be used "
            f"together: {error}; give PEM files that belong to each other"
        ) from error
    if ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(ca_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigurationError(
                f"server-ca-file: {ca_file} holds no usable PEM certificates: {error}"
            ) from error
    return context


def reload_certificates(
    context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str = ""
) -> None:
    """Read the files of a server's TLS context again, for new connections.

    Authorities are added only: to revoke one, restart the server.

    Raises:
        ConfigurationError: as :func:`server_context`. The context stays as it was.
    """
    server_context(cert_file, key_file, ca_file)  # a failure must not leave half of a change
    context.load_cert_chain(cert_file, key_file or None)
    if ca_file:
        context.load_verify_locations(ca_file)

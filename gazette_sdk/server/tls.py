"""TLS of a server's public port, and files that options name (operations section 1).

An option that is a secret, such as ``auth-keys``, may be given as a file by ``auth-keys-file``
(:func:`with_secrets`). The environment variable of such an option ends with ``_FILE``, as for many
container images. So a secret that an orchestrator mounts as a file appears in no command line and
no environment.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError as PydanticValidationError

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Group, Settings

SECRET_BYTES_MAX = 1 << 20
"""Greatest length of a secret: a larger file is certainly not one."""

_FILE = "_file"

S = TypeVar("S", bound=Settings)


def with_secrets(group: Group[S], settings: S) -> S:
    """Return settings with the content of the files that hold secrets.

    White space at the end of a file is no part of the secret.

    Raises:
        ConfigurationError: a file cannot be read or is empty, its content is refused, or the same
            secret is given in two ways.
    """
    options = {bound.field: bound.long for bound in group.options}
    secrets: dict[str, str] = {}
    for name in options.keys() & {field + _FILE for field in options}:
        path, secret = getattr(settings, name), name.removesuffix(_FILE)
        if not path:
            continue
        if getattr(settings, secret):
            raise ConfigurationError(
                f"--{options[secret]} and --{options[name]} are both given; leave one out"
            )
        secrets[secret] = _read(path, f"--{options[name]}")
    if not secrets:
        return settings
    try:
        return type(settings).model_validate(settings.model_dump() | secrets)
    except PydanticValidationError as error:
        reasons = [problem["msg"].removeprefix("Value error, ") for problem in error.errors()]
        raise ConfigurationError("; ".join(reasons)) from None


def check_files(group: Group[S], settings: S) -> None:
    """Check the files of certificates that options name, before anything starts.

    Raises:
        ConfigurationError: a file is missing, unreadable or of another kind. It names the option.
    """
    options = {bound.field: f"--{bound.long}" for bound in group.options}
    for kind, authorities in (("server_", "server_ca"), ("peer_", "peer_ca"), ("", "trusted_ca")):
        names = f"{kind}cert_file", f"{kind}cert_key_file", f"{authorities}_file"
        if not options.keys() >= set(names):
            continue
        files = [getattr(settings, name) for name in names]
        try:
            check_certificates(*files)
        except ConfigurationError as error:
            text = str(error)
            given = [
                options[name]
                for name, path in zip(names, files, strict=True)
                if path and path in text
            ]
            raise ConfigurationError(f"{' and '.join(given)}: {text}") from error


def file_root_of(path: str, option: str = "--file-root") -> Path | None:
    """Return the directory of an option, or None if it is not given.

    Args:
        path: the option's value.
        option: its name.

    Raises:
        ConfigurationError: it is no directory.
    """
    if path and not Path(path).is_dir():
        raise ConfigurationError(f"{option}: {path} is no directory; create it")
    return Path(path) if path else None


def _read(path: str, option: str) -> str:
    try:
        with Path(path).open("rb") as file:
            content = file.read(SECRET_BYTES_MAX + 1)
        text = content.decode().rstrip()
    except OSError as error:
        raise ConfigurationError(
            f"{option}: {path} cannot be read ({error.strerror}); check its path and permissions"
        ) from error
    except UnicodeDecodeError:
        text = ""
    if not text or len(content) > SECRET_BYTES_MAX:
        raise ConfigurationError(
            f"{option}: {path} is empty or holds no text; write the secret into it"
        )
    return text


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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(list(alpn))
    _load(context, cert_file, key_file, ca_file)
    if ca_file:
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def check_certificates(cert_file: str, key_file: str = "", ca_file: str = "") -> None:
    """Check files of certificates, of a server or of a client.

    Args:
        cert_file: PEM file with a certificate chain; empty for none.
        key_file: PEM file with its key; empty if ``cert_file`` has the key.
        ca_file: PEM file of authorities; empty for none.

    Raises:
        ConfigurationError: a file is missing, unreadable or of another kind.
    """
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert_file, key_file, ca_file)


def _load(context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str) -> None:
    for path in (cert_file, key_file, ca_file):
        try:
            if path:
                Path(path).open("rb").close()
        except OSError as error:
            raise ConfigurationError(
                f"{path} cannot be read ({error.strerror}); check its path and permissions"
            ) from error
    try:
        if cert_file:
            # With a password none is asked for at the terminal.
            context.load_cert_chain(cert_file, key_file or None, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(
            f"the certificate {cert_file} and the key {key_file or cert_file} cannot be used "
            f"together: {error}; give PEM files that belong to each other, the key without a "
            "password"
        ) from error
    try:
        if ca_file:
            context.load_verify_locations(ca_file)
    except (ssl.SSLError, OSError) as error:
        raise ConfigurationError(f"{ca_file} holds no usable PEM certificates: {error}") from error


def reload_certificates(
    context: ssl.SSLContext, cert_file: str, key_file: str, ca_file: str = ""
) -> None:
    """Read the files of a server's TLS context again, for new connections.

    Authorities are added only: to revoke one, restart the server.

    Raises:
        ConfigurationError: as :func:`server_context`. The context stays as it was.
    """
    check_certificates(cert_file, key_file, ca_file)  # a failure must not leave half of a change
    _load(context, cert_file, key_file, ca_file)


_TIMES = re.compile(rb"\x17\x0d(\d{12})Z|\x18\x0f(\d{14})Z")
"""Times of a certificate in DER. The first two are its begin and its end."""


def end_of_certificate(der: bytes) -> float | None:
    """Return the end of a certificate in DER, in Unix seconds; None if it has none."""
    times = [match[1] or match[2] for match in _TIMES.finditer(der)][:2]
    if len(times) < 2:
        return None
    text = times[1].decode()
    if len(text) == 12:  # two digits of the year, of 1950 to 2049
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%S").replace(tzinfo=UTC).timestamp()


def certificate_end(path: str) -> float | None:
    """Return the end of the first certificate of a PEM file; None if it cannot be read."""
    try:
        text = Path(path).read_text(encoding="ascii")
        begin = text.index("-----BEGIN CERTIFICATE-----")
        end = text.index("-----END CERTIFICATE-----", begin)
        der = ssl.PEM_cert_to_DER_cert(text[begin:end] + "-----END CERTIFICATE-----\n")
    except (OSError, ValueError):
        return None
    return end_of_certificate(der)

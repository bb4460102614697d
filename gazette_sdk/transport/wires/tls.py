"""Certificates of a client."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gazette_sdk.errors import ConfigurationError

__all__ = ["Tls"]


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of a client.

    Attributes:
        trusted_ca_file: PEM file of authorities that sign server certificates; empty for the
            system's.
        cert_file: PEM file of the client's own certificate, where servers require one.
        cert_key_file: PEM file of its key.
    """

    trusted_ca_file: str = ""
    cert_file: str = ""
    cert_key_file: str = ""

    def content(self, path: str) -> bytes | None:
        """Return the content of one of the files; ``None`` for an empty path.

        Raises:
            ConfigurationError: it cannot be read.
        """
        if not path:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as error:
            raise ConfigurationError(f"cannot read the PEM file {path}: {error}") from error

    def stamps(self) -> tuple[int, ...]:
        """Return the times of modification of the files, 0 for a missing one."""
        found = []
        for path in (self.trusted_ca_file, self.cert_file, self.cert_key_file):
            try:
                found.append(Path(path).stat().st_mtime_ns if path else 0)
            except OSError:
                found.append(0)
        return tuple(found)

    def context(self, protocols: Sequence[str]) -> ssl.SSLContext:
        """Return the context for connections of the stream transport.

        Args:
            protocols: names to offer by ALPN, the best first.

        Raises:
            ConfigurationError: a file cannot be used.
        """
        for path in (self.trusted_ca_file, self.cert_file, self.cert_key_file):
            self.content(path)  # names the file that cannot be read
        try:
            context = ssl.create_default_context(cafile=self.trusted_ca_file or None)
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.cert_key_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"the client's certificates ({self}) cannot be used: {error}"
            ) from error
        context.set_alpn_protocols(list(protocols))
        return context

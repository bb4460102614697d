"""Errors of Etcd."""

from __future__ import annotations

from gazette_sdk.errors.base import GazetteError


class EtcdError(GazetteError):
    """Etcd failed, or refused a request.

    Remedy: check Etcd's log and ``etcdctl endpoint health``.
    """


class EtcdUnavailableError(EtcdError):
    """Etcd cannot be reached.

    Remedy: check ``--etcd.address``, the certificates, and that Etcd runs.
    """


class EtcdCompactedError(EtcdError):
    """A watch requires a revision that Etcd has compacted.

    Remedy: none is needed. The watch loads all keys again, and continues.

    Attributes:
        compact_revision: the oldest revision that Etcd keeps; 0 if it is not known.
    """

    def __init__(self, message: str, *, compact_revision: int = 0) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class LeaseLostError(EtcdError):
    """The lease of the process expired or was revoked, so other brokers took over its journals.

    Remedy: let a supervisor restart the broker. If it happens often, raise ``--etcd.lease``, and
    check the load of the machine and the network to Etcd.
    """

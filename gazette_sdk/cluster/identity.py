"""Identity of a member towards its cluster, and the check of proxied requests (shard section 10).

A broker or a consumer names itself in the headers of its answers. It serves a proxied request only
if that was meant for it, and was resolved with the same Etcd cluster.
"""

from __future__ import annotations

from gazette_sdk.cluster.item_keyspace import ItemKeySpace
from gazette_sdk.errors import GazetteError
from gazette_sdk.protocol import broker_pb2 as pb

__all__ = ["LocalIdentity"]


class LocalIdentity:
    """Identity of this process in a cluster.

    Args:
        keyspace: the mirror of Etcd.
        process_id: this process.
        missing_id: stands for it while its member key is removed.
        kind: what its members are called: ``broker`` or ``consumer``.
    """

    def __init__(
        self,
        keyspace: ItemKeySpace[object, object, object],
        process_id: pb.ProcessSpec.ID,
        *,
        missing_id: pb.ProcessSpec.ID,
        kind: str,
    ) -> None:
        self._keyspace = keyspace
        self._process_id = process_id
        self._missing_id = missing_id
        self._kind = kind

    @property
    def local_id(self) -> pb.ProcessSpec.ID:
        """This process' id, or the placeholder when its member key is removed."""
        zone, suffix = self._process_id.zone, self._process_id.suffix
        return self._missing_id if self._keyspace.member(zone, suffix) is None else self._process_id

    def check_header(self, header: pb.Header) -> None:
        """Check the header of a request that another member proxied to this one.

        Raises:
            GazetteError: it is of another cluster, or for another process.
        """
        ours = self._keyspace.header.cluster_id
        if header.etcd.cluster_id != ours:
            raise GazetteError(
                f"the request comes from another Etcd cluster ({header.etcd.cluster_id}, "
                f"ours is {ours}): check the {self._kind}s' --etcd.address"
            )
        process, local = header.process_id, self.local_id
        if (process.zone or process.suffix) and process != local:
            raise GazetteError(
                f"the request is for {self._kind} {process.zone}/{process.suffix}, "
                f"and this is {local.zone}/{local.suffix}"
            )

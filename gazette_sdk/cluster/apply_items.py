"""Changes of items, all in one transaction (broker section 14, shard section 11)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gazette_sdk.cluster.etcd import Etcd
from gazette_sdk.cluster.etcd_messages import Compare, Delete, Operation, Put
from gazette_sdk.cluster.item_keyspace import ItemKeySpace
from gazette_sdk.errors import EtcdError

__all__ = ["ANY_REVISION", "AppliedItems", "ItemChange", "apply_items"]

ANY_REVISION = -1
"""Expected revision of a change that does not depend on the item's current revision."""


@dataclass(frozen=True, slots=True)
class ItemChange:
    """Change of one item.

    Attributes:
        item: the item's id.
        expect_mod_revision: its current revision; 0 if it must not exist, or
            :data:`ANY_REVISION`.
        value: its new value; ``None`` deletes it.
    """

    item: str
    expect_mod_revision: int
    value: bytes | None


@dataclass(frozen=True, slots=True)
class AppliedItems:
    """Result of a transaction.

    Attributes:
        succeeded: False if an item, or a further condition, was not as expected.
        revision: of Etcd, of the transaction.
    """

    succeeded: bool
    revision: int


async def apply_items(
    etcd: Etcd,
    keyspace: ItemKeySpace[object, object, object],
    changes: Sequence[ItemChange],
    *,
    compares: Iterable[Compare] = (),
    puts: Iterable[Put] = (),
) -> AppliedItems:
    """Apply changes of items, all or none, and wait until the mirror has them.

    Args:
        etcd: the client.
        keyspace: the mirror.
        changes: the changes.
        compares: further conditions.
        puts: further keys to write.

    Raises:
        EtcdError: Etcd failed, or refused.
    """
    conditions = [
        Compare.mod_revision(keyspace.item_key(change.item), change.expect_mod_revision)
        for change in changes
        if change.expect_mod_revision != ANY_REVISION
    ]
    conditions += compares
    operations: list[Operation] = [
        Delete(keyspace.item_key(change.item))
        if change.value is None
        else Put(keyspace.item_key(change.item), change.value)
        for change in changes
    ]
    operations += puts
    try:
        result = await etcd.txn(dict.fromkeys(conditions), operations)
    except EtcdError as error:
        if "too many operations" not in str(error):
            raise
        raise EtcdError(
            f"{error}: the request has {len(changes)} changes, and Etcd takes 128 in one "
            "transaction unless configured otherwise; apply them in several requests"
        ) from error
    is_write = result.deleted or any(isinstance(operation, Put) for operation in operations)
    if result.succeeded and is_write:
        # The caller must be able to read its writes. A transaction that deleted only missing
        # keys changed nothing: our mirror may never reach its revision.
        await keyspace.wait_for_revision(result.revision)
    return AppliedItems(result.succeeded, result.revision)

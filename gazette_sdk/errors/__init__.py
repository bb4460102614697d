"""Errors of gazette_sdk, in one tree.

::

    GazetteError
    ├── ValidationError              a value is malformed: names the field and the rule
    ├── ConfigurationError           a flag, file, address or environment value cannot be used
    │   └── MissingPackageError      a package of an extra is not installed; also an ImportError
    ├── StatusError                  a broker answered with a status other than OK
    │   ├── JournalNotFoundError, NoJournalPrimaryBrokerError, NotJournalPrimaryBrokerError,
    │   ├── InsufficientJournalBrokersError, NotJournalBrokerError, OffsetNotYetAvailableError,
    │   ├── WrongRouteError, ProposalMismatchError, EtcdTransactionFailedError, NotAllowedError,
    │   ├── WrongAppendOffsetError, IndexHasGreaterOffsetError, RegisterMismatchError,
    │   └── SuspendedError, FragmentStoreUnhealthyError
    ├── CallError                    a call ended without an answer
    │   └── UnavailableError, UnauthenticatedError, DeadlineExceededError, CallCancelledError
    ├── StoreError                   a fragment store failed
    │   └── StoreAuthorizationError, FragmentNotFoundError, CorruptFragmentError
    ├── EtcdError                    Etcd failed or refused
    │   └── EtcdUnavailableError, EtcdCompactedError, LeaseLostError
    ├── FramingError                 bytes of a journal cannot be decoded as messages
    │   └── DecodeError, DesyncError, OversizedFrameError, TornFrameError
    ├── RecoveryError                a recovery log cannot be played back or continued
    ├── FencedError                  another process has taken over a shard
    ├── CheckpointMismatchError      a checkpoint is of an earlier journal of the same name
    ├── JournalExistsError           a journal to create exists with other settings
    ├── MappingError                 a message maps to no journal
    ├── ShardStatusError             a consumer process answered with a status other than OK
    ├── StreamProtocolError          a peer broke the rules of the stream transport
    ├── ShardStoreError              the state of a shard cannot be read or written
    │   └── UnreadableStateError     a value of the state would not be read again as it is
    ├── BackPressureError            the bound of unsent messages is reached
    ├── DeliveryTimeoutError         an append was not acknowledged in time
    ├── ReentrantCallError           a call in a signal handler would wait for the call below it
    ├── UserCodeError                user code raised what ends an iteration, a task or a process
    └── ClosedError                  used after it was closed

Each error has attributes of its subject (``journal``, ``offset``, ``status``; ``None`` where they
do not apply). The text names the remedy; the docstring of each class has it, too.

Modules: ``base``, ``journals`` (with the statuses of brokers), ``calls``, ``stores`` of fragments,
``etcd``, ``messages`` and ``shards``. Import errors from this package.
"""

from __future__ import annotations

from gazette_sdk.errors.base import (
    ClosedError,
    ConfigurationError,
    GazetteError,
    MissingPackageError,
    ReentrantCallError,
    UserCodeError,
    ValidationError,
    check_number,
    install_text,
    needs_extra,
)
from gazette_sdk.errors.calls import (
    CallCancelledError,
    CallError,
    DeadlineExceededError,
    StreamProtocolError,
    UnauthenticatedError,
    UnavailableError,
)
from gazette_sdk.errors.etcd import (
    EtcdCompactedError,
    EtcdError,
    EtcdUnavailableError,
    LeaseLostError,
)
from gazette_sdk.errors.journals import (
    STATUS_NAMES,
    EtcdTransactionFailedError,
    FragmentStoreUnhealthyError,
    IndexHasGreaterOffsetError,
    InsufficientJournalBrokersError,
    JournalExistsError,
    JournalNotFoundError,
    NoJournalPrimaryBrokerError,
    NotAllowedError,
    NotJournalBrokerError,
    NotJournalPrimaryBrokerError,
    OffsetNotYetAvailableError,
    ProposalMismatchError,
    RegisterMismatchError,
    StatusError,
    SuspendedError,
    WrongAppendOffsetError,
    WrongRouteError,
    for_status,
)
from gazette_sdk.errors.messages import (
    BackPressureError,
    CheckpointMismatchError,
    DecodeError,
    DeliveryTimeoutError,
    DesyncError,
    FramingError,
    MappingError,
    OversizedFrameError,
    TornFrameError,
)
from gazette_sdk.errors.shards import (
    FencedError,
    RecoveryError,
    ShardStatusError,
    ShardStoreError,
    UnreadableStateError,
)
from gazette_sdk.errors.stores import (
    CorruptFragmentError,
    FragmentNotFoundError,
    StoreAuthorizationError,
    StoreError,
)

__all__ = [
    "STATUS_NAMES",
    "BackPressureError",
    "CallCancelledError",
    "CallError",
    "CheckpointMismatchError",
    "ClosedError",
    "ConfigurationError",
    "CorruptFragmentError",
    "DeadlineExceededError",
    "DecodeError",
    "DeliveryTimeoutError",
    "DesyncError",
    "EtcdCompactedError",
    "EtcdError",
    "EtcdTransactionFailedError",
    "EtcdUnavailableError",
    "FencedError",
    "FragmentNotFoundError",
    "FragmentStoreUnhealthyError",
    "FramingError",
    "GazetteError",
    "IndexHasGreaterOffsetError",
    "InsufficientJournalBrokersError",
    "JournalExistsError",
    "JournalNotFoundError",
    "LeaseLostError",
    "MappingError",
    "MissingPackageError",
    "NoJournalPrimaryBrokerError",
    "NotAllowedError",
    "NotJournalBrokerError",
    "NotJournalPrimaryBrokerError",
    "OffsetNotYetAvailableError",
    "OversizedFrameError",
    "ProposalMismatchError",
    "RecoveryError",
    "ReentrantCallError",
    "RegisterMismatchError",
    "ShardStatusError",
    "ShardStoreError",
    "StatusError",
    "StoreAuthorizationError",
    "StoreError",
    "StreamProtocolError",
    "SuspendedError",
    "TornFrameError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnreadableStateError",
    "UserCodeError",
    "ValidationError",
    "WrongAppendOffsetError",
    "WrongRouteError",
    "check_number",
    "for_status",
    "install_text",
    "needs_extra",
]

for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = __name__  # as programs import it, and tracebacks show it

from gazette_sdk.protocol import broker_pb2 as _broker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JournalState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOURNAL_OK: _ClassVar[JournalState]
    JOURNAL_SHORT: _ClassVar[JournalState]
    JOURNAL_SINGLE_ZONE: _ClassVar[JournalState]
    JOURNAL_NO_PRIMARY: _ClassVar[JournalState]
    JOURNAL_UNASSIGNED: _ClassVar[JournalState]
    JOURNAL_WAITING: _ClassVar[JournalState]
    JOURNAL_SUSPENDED: _ClassVar[JournalState]

class JournalSort(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BY_NAME: _ClassVar[JournalSort]
    BY_STATE: _ClassVar[JournalSort]
    BY_REPLICATION: _ClassVar[JournalSort]
    BY_HEAD: _ClassVar[JournalSort]
    BY_RATE: _ClassVar[JournalSort]
    BY_SIZE: _ClassVar[JournalSort]
    BY_UNSTORED: _ClassVar[JournalSort]

class Severity(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INFO: _ClassVar[Severity]
    WARNING: _ClassVar[Severity]
    ERROR: _ClassVar[Severity]

class ShardSort(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BY_ID: _ClassVar[ShardSort]
    BY_SHARD_STATE: _ClassVar[ShardSort]
    BY_LAG_BYTES: _ClassVar[ShardSort]
    BY_LAG_SECONDS: _ClassVar[ShardSort]
JOURNAL_OK: JournalState
JOURNAL_SHORT: JournalState
JOURNAL_SINGLE_ZONE: JournalState
JOURNAL_NO_PRIMARY: JournalState
JOURNAL_UNASSIGNED: JournalState
JOURNAL_WAITING: JournalState
JOURNAL_SUSPENDED: JournalState
BY_NAME: JournalSort
BY_STATE: JournalSort
BY_REPLICATION: JournalSort
BY_HEAD: JournalSort
BY_RATE: JournalSort
BY_SIZE: JournalSort
BY_UNSTORED: JournalSort
INFO: Severity
WARNING: Severity
ERROR: Severity
BY_ID: ShardSort
BY_SHARD_STATE: ShardSort
BY_LAG_BYTES: ShardSort
BY_LAG_SECONDS: ShardSort

class JournalsPageRequest(_message.Message):
    __slots__ = ("selector", "search", "sort", "descending", "after", "skip", "limit", "states")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    DESCENDING_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    selector: _broker_pb2.LabelSelector
    search: str
    sort: JournalSort
    descending: bool
    after: str
    skip: int
    limit: int
    states: _containers.RepeatedScalarFieldContainer[JournalState]
    def __init__(self, selector: _Optional[_Union[_broker_pb2.LabelSelector, _Mapping]] = ..., search: _Optional[str] = ..., sort: _Optional[_Union[JournalSort, str]] = ..., descending: _Optional[bool] = ..., after: _Optional[str] = ..., skip: _Optional[int] = ..., limit: _Optional[int] = ..., states: _Optional[_Iterable[_Union[JournalState, str]]] = ...) -> None: ...

class JournalsPageResponse(_message.Message):
    __slots__ = ("header", "members", "rows", "total", "states", "next", "revision")
    class Row(_message.Message):
        __slots__ = ("name", "replication", "members", "primary", "state", "labels", "stores", "head", "begin", "size", "unstored", "rate")
        NAME_FIELD_NUMBER: _ClassVar[int]
        REPLICATION_FIELD_NUMBER: _ClassVar[int]
        MEMBERS_FIELD_NUMBER: _ClassVar[int]
        PRIMARY_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        LABELS_FIELD_NUMBER: _ClassVar[int]
        STORES_FIELD_NUMBER: _ClassVar[int]
        HEAD_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        SIZE_FIELD_NUMBER: _ClassVar[int]
        UNSTORED_FIELD_NUMBER: _ClassVar[int]
        RATE_FIELD_NUMBER: _ClassVar[int]
        name: str
        replication: int
        members: _containers.RepeatedScalarFieldContainer[int]
        primary: int
        state: JournalState
        labels: _broker_pb2.LabelSet
        stores: _containers.RepeatedScalarFieldContainer[str]
        head: int
        begin: int
        size: int
        unstored: int
        rate: float
        def __init__(self, name: _Optional[str] = ..., replication: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ..., primary: _Optional[int] = ..., state: _Optional[_Union[JournalState, str]] = ..., labels: _Optional[_Union[_broker_pb2.LabelSet, _Mapping]] = ..., stores: _Optional[_Iterable[str]] = ..., head: _Optional[int] = ..., begin: _Optional[int] = ..., size: _Optional[int] = ..., unstored: _Optional[int] = ..., rate: _Optional[float] = ...) -> None: ...
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    members: _containers.RepeatedCompositeFieldContainer[_broker_pb2.ProcessSpec.ID]
    rows: _containers.RepeatedCompositeFieldContainer[JournalsPageResponse.Row]
    total: int
    states: _containers.ScalarMap[str, int]
    next: str
    revision: int
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., members: _Optional[_Iterable[_Union[_broker_pb2.ProcessSpec.ID, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[JournalsPageResponse.Row, _Mapping]]] = ..., total: _Optional[int] = ..., states: _Optional[_Mapping[str, int]] = ..., next: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class HeadsRequest(_message.Message):
    __slots__ = ("journals", "local")
    JOURNALS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    journals: _containers.RepeatedScalarFieldContainer[str]
    local: bool
    def __init__(self, journals: _Optional[_Iterable[str]] = ..., local: _Optional[bool] = ...) -> None: ...

class HeadsResponse(_message.Message):
    __slots__ = ("header", "heads")
    class Replica(_message.Message):
        __slots__ = ("member", "head", "unstored", "synced")
        MEMBER_FIELD_NUMBER: _ClassVar[int]
        HEAD_FIELD_NUMBER: _ClassVar[int]
        UNSTORED_FIELD_NUMBER: _ClassVar[int]
        SYNCED_FIELD_NUMBER: _ClassVar[int]
        member: _broker_pb2.ProcessSpec.ID
        head: int
        unstored: int
        synced: bool
        def __init__(self, member: _Optional[_Union[_broker_pb2.ProcessSpec.ID, _Mapping]] = ..., head: _Optional[int] = ..., unstored: _Optional[int] = ..., synced: _Optional[bool] = ...) -> None: ...
    class Head(_message.Message):
        __slots__ = ("journal", "head", "begin", "size", "unstored", "rate", "oldest_unstored_s", "replicas", "error", "registers")
        JOURNAL_FIELD_NUMBER: _ClassVar[int]
        HEAD_FIELD_NUMBER: _ClassVar[int]
        BEGIN_FIELD_NUMBER: _ClassVar[int]
        SIZE_FIELD_NUMBER: _ClassVar[int]
        UNSTORED_FIELD_NUMBER: _ClassVar[int]
        RATE_FIELD_NUMBER: _ClassVar[int]
        OLDEST_UNSTORED_S_FIELD_NUMBER: _ClassVar[int]
        REPLICAS_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        REGISTERS_FIELD_NUMBER: _ClassVar[int]
        journal: str
        head: int
        begin: int
        size: int
        unstored: int
        rate: float
        oldest_unstored_s: float
        replicas: _containers.RepeatedCompositeFieldContainer[HeadsResponse.Replica]
        error: str
        registers: _broker_pb2.LabelSet
        def __init__(self, journal: _Optional[str] = ..., head: _Optional[int] = ..., begin: _Optional[int] = ..., size: _Optional[int] = ..., unstored: _Optional[int] = ..., rate: _Optional[float] = ..., oldest_unstored_s: _Optional[float] = ..., replicas: _Optional[_Iterable[_Union[HeadsResponse.Replica, _Mapping]]] = ..., error: _Optional[str] = ..., registers: _Optional[_Union[_broker_pb2.LabelSet, _Mapping]] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    heads: _containers.RepeatedCompositeFieldContainer[HeadsResponse.Head]
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., heads: _Optional[_Iterable[_Union[HeadsResponse.Head, _Mapping]]] = ...) -> None: ...

class MembersRequest(_message.Message):
    __slots__ = ("local", "details")
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    local: bool
    details: bool
    def __init__(self, local: _Optional[bool] = ..., details: _Optional[bool] = ...) -> None: ...

class Member(_message.Message):
    __slots__ = ("id", "component", "endpoint", "version", "python", "started_us", "clock_us", "limit", "replicas", "primaries", "exiting", "lease_left_s", "loop_lag_s", "key_ids", "append_bytes", "read_bytes", "disk_free", "etcd_version", "error", "lease_s", "append_rate", "read_rate", "unstored", "oldest_unstored_s", "oldest_unstored_journal", "stores", "refuses_token")
    ID_FIELD_NUMBER: _ClassVar[int]
    COMPONENT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PYTHON_FIELD_NUMBER: _ClassVar[int]
    STARTED_US_FIELD_NUMBER: _ClassVar[int]
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    PRIMARIES_FIELD_NUMBER: _ClassVar[int]
    EXITING_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    KEY_IDS_FIELD_NUMBER: _ClassVar[int]
    APPEND_BYTES_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_FREE_FIELD_NUMBER: _ClassVar[int]
    ETCD_VERSION_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    APPEND_RATE_FIELD_NUMBER: _ClassVar[int]
    READ_RATE_FIELD_NUMBER: _ClassVar[int]
    UNSTORED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UNSTORED_S_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UNSTORED_JOURNAL_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    REFUSES_TOKEN_FIELD_NUMBER: _ClassVar[int]
    id: _broker_pb2.ProcessSpec.ID
    component: str
    endpoint: str
    version: str
    python: str
    started_us: int
    clock_us: int
    limit: int
    replicas: int
    primaries: int
    exiting: bool
    lease_left_s: float
    loop_lag_s: float
    key_ids: _containers.RepeatedScalarFieldContainer[str]
    append_bytes: int
    read_bytes: int
    disk_free: int
    etcd_version: str
    error: str
    lease_s: float
    append_rate: float
    read_rate: float
    unstored: int
    oldest_unstored_s: float
    oldest_unstored_journal: str
    stores: _containers.RepeatedCompositeFieldContainer[ReportResponse.Store]
    refuses_token: bool
    def __init__(self, id: _Optional[_Union[_broker_pb2.ProcessSpec.ID, _Mapping]] = ..., component: _Optional[str] = ..., endpoint: _Optional[str] = ..., version: _Optional[str] = ..., python: _Optional[str] = ..., started_us: _Optional[int] = ..., clock_us: _Optional[int] = ..., limit: _Optional[int] = ..., replicas: _Optional[int] = ..., primaries: _Optional[int] = ..., exiting: _Optional[bool] = ..., lease_left_s: _Optional[float] = ..., loop_lag_s: _Optional[float] = ..., key_ids: _Optional[_Iterable[str]] = ..., append_bytes: _Optional[int] = ..., read_bytes: _Optional[int] = ..., disk_free: _Optional[int] = ..., etcd_version: _Optional[str] = ..., error: _Optional[str] = ..., lease_s: _Optional[float] = ..., append_rate: _Optional[float] = ..., read_rate: _Optional[float] = ..., unstored: _Optional[int] = ..., oldest_unstored_s: _Optional[float] = ..., oldest_unstored_journal: _Optional[str] = ..., stores: _Optional[_Iterable[_Union[ReportResponse.Store, _Mapping]]] = ..., refuses_token: _Optional[bool] = ...) -> None: ...

class MembersResponse(_message.Message):
    __slots__ = ("header", "members")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    members: _containers.RepeatedCompositeFieldContainer[Member]
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., members: _Optional[_Iterable[_Union[Member, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("id", "started_us")
    ID_FIELD_NUMBER: _ClassVar[int]
    STARTED_US_FIELD_NUMBER: _ClassVar[int]
    id: _broker_pb2.ProcessSpec.ID
    started_us: int
    def __init__(self, id: _Optional[_Union[_broker_pb2.ProcessSpec.ID, _Mapping]] = ..., started_us: _Optional[int] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("header", "replicas")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    replicas: int
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., replicas: _Optional[int] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Problem(_message.Message):
    __slots__ = ("severity", "check", "kind", "subject", "others", "text", "command", "since_us")
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    SINCE_US_FIELD_NUMBER: _ClassVar[int]
    severity: Severity
    check: str
    kind: str
    subject: str
    others: int
    text: str
    command: str
    since_us: int
    def __init__(self, severity: _Optional[_Union[Severity, str]] = ..., check: _Optional[str] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., others: _Optional[int] = ..., text: _Optional[str] = ..., command: _Optional[str] = ..., since_us: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("header", "cluster", "clock_us", "brokers", "zones", "journals", "replicas", "states", "unstored", "oldest_unstored_s", "append_rate", "read_rate", "stores", "applications", "versions", "problems")
    class Store(_message.Message):
        __slots__ = ("url", "journals", "healthy", "since_us", "error", "unstored")
        URL_FIELD_NUMBER: _ClassVar[int]
        JOURNALS_FIELD_NUMBER: _ClassVar[int]
        HEALTHY_FIELD_NUMBER: _ClassVar[int]
        SINCE_US_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        UNSTORED_FIELD_NUMBER: _ClassVar[int]
        url: str
        journals: int
        healthy: bool
        since_us: int
        error: str
        unstored: int
        def __init__(self, url: _Optional[str] = ..., journals: _Optional[int] = ..., healthy: _Optional[bool] = ..., since_us: _Optional[int] = ..., error: _Optional[str] = ..., unstored: _Optional[int] = ...) -> None: ...
    class Application(_message.Message):
        __slots__ = ("name", "processes", "shards", "failed", "without_primary", "recovering", "lag_bytes", "lag_s", "error")
        NAME_FIELD_NUMBER: _ClassVar[int]
        PROCESSES_FIELD_NUMBER: _ClassVar[int]
        SHARDS_FIELD_NUMBER: _ClassVar[int]
        FAILED_FIELD_NUMBER: _ClassVar[int]
        WITHOUT_PRIMARY_FIELD_NUMBER: _ClassVar[int]
        RECOVERING_FIELD_NUMBER: _ClassVar[int]
        LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
        LAG_S_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        name: str
        processes: int
        shards: int
        failed: int
        without_primary: int
        recovering: int
        lag_bytes: int
        lag_s: float
        error: str
        def __init__(self, name: _Optional[str] = ..., processes: _Optional[int] = ..., shards: _Optional[int] = ..., failed: _Optional[int] = ..., without_primary: _Optional[int] = ..., recovering: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., lag_s: _Optional[float] = ..., error: _Optional[str] = ...) -> None: ...
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_US_FIELD_NUMBER: _ClassVar[int]
    BROKERS_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    JOURNALS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    UNSTORED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_UNSTORED_S_FIELD_NUMBER: _ClassVar[int]
    APPEND_RATE_FIELD_NUMBER: _ClassVar[int]
    READ_RATE_FIELD_NUMBER: _ClassVar[int]
    STORES_FIELD_NUMBER: _ClassVar[int]
    APPLICATIONS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    cluster: str
    clock_us: int
    brokers: int
    zones: _containers.RepeatedScalarFieldContainer[str]
    journals: int
    replicas: int
    states: _containers.ScalarMap[str, int]
    unstored: int
    oldest_unstored_s: float
    append_rate: float
    read_rate: float
    stores: _containers.RepeatedCompositeFieldContainer[ReportResponse.Store]
    applications: _containers.RepeatedCompositeFieldContainer[ReportResponse.Application]
    versions: _containers.RepeatedScalarFieldContainer[str]
    problems: _containers.RepeatedCompositeFieldContainer[Problem]
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., cluster: _Optional[str] = ..., clock_us: _Optional[int] = ..., brokers: _Optional[int] = ..., zones: _Optional[_Iterable[str]] = ..., journals: _Optional[int] = ..., replicas: _Optional[int] = ..., states: _Optional[_Mapping[str, int]] = ..., unstored: _Optional[int] = ..., oldest_unstored_s: _Optional[float] = ..., append_rate: _Optional[float] = ..., read_rate: _Optional[float] = ..., stores: _Optional[_Iterable[_Union[ReportResponse.Store, _Mapping]]] = ..., applications: _Optional[_Iterable[_Union[ReportResponse.Application, _Mapping]]] = ..., versions: _Optional[_Iterable[str]] = ..., problems: _Optional[_Iterable[_Union[Problem, _Mapping]]] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after", "no_wait", "local")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    NO_WAIT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    after: str
    no_wait: bool
    local: bool
    def __init__(self, after: _Optional[str] = ..., no_wait: _Optional[bool] = ..., local: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "time_us", "kind", "subject", "text", "severity", "member")
    ID_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    SEVERITY_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    id: str
    time_us: int
    kind: str
    subject: str
    text: str
    severity: Severity
    member: str
    def __init__(self, id: _Optional[str] = ..., time_us: _Optional[int] = ..., kind: _Optional[str] = ..., subject: _Optional[str] = ..., text: _Optional[str] = ..., severity: _Optional[_Union[Severity, str]] = ..., member: _Optional[str] = ...) -> None: ...

class ShardsPageRequest(_message.Message):
    __slots__ = ("selector", "search", "sort", "descending", "after", "skip", "limit", "states", "local", "source")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    SEARCH_FIELD_NUMBER: _ClassVar[int]
    SORT_FIELD_NUMBER: _ClassVar[int]
    DESCENDING_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    SKIP_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    selector: _broker_pb2.LabelSelector
    search: str
    sort: ShardSort
    descending: bool
    after: str
    skip: int
    limit: int
    states: _containers.RepeatedScalarFieldContainer[str]
    local: bool
    source: str
    def __init__(self, selector: _Optional[_Union[_broker_pb2.LabelSelector, _Mapping]] = ..., search: _Optional[str] = ..., sort: _Optional[_Union[ShardSort, str]] = ..., descending: _Optional[bool] = ..., after: _Optional[str] = ..., skip: _Optional[int] = ..., limit: _Optional[int] = ..., states: _Optional[_Iterable[str]] = ..., local: _Optional[bool] = ..., source: _Optional[str] = ...) -> None: ...

class ShardsPageResponse(_message.Message):
    __slots__ = ("header", "application", "members", "rows", "total", "states", "next", "revision")
    class Row(_message.Message):
        __slots__ = ("id", "state", "members", "primary", "labels", "read_through", "lag_bytes", "lag_s", "recovered_bytes", "recovery_bytes", "watermark_us", "error", "recovery_log")
        class ReadThroughEntry(_message.Message):
            __slots__ = ("key", "value")
            KEY_FIELD_NUMBER: _ClassVar[int]
            VALUE_FIELD_NUMBER: _ClassVar[int]
            key: str
            value: int
            def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
        ID_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        MEMBERS_FIELD_NUMBER: _ClassVar[int]
        PRIMARY_FIELD_NUMBER: _ClassVar[int]
        LABELS_FIELD_NUMBER: _ClassVar[int]
        READ_THROUGH_FIELD_NUMBER: _ClassVar[int]
        LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
        LAG_S_FIELD_NUMBER: _ClassVar[int]
        RECOVERED_BYTES_FIELD_NUMBER: _ClassVar[int]
        RECOVERY_BYTES_FIELD_NUMBER: _ClassVar[int]
        WATERMARK_US_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        RECOVERY_LOG_FIELD_NUMBER: _ClassVar[int]
        id: str
        state: str
        members: _containers.RepeatedScalarFieldContainer[int]
        primary: int
        labels: _broker_pb2.LabelSet
        read_through: _containers.ScalarMap[str, int]
        lag_bytes: int
        lag_s: float
        recovered_bytes: int
        recovery_bytes: int
        watermark_us: int
        error: str
        recovery_log: str
        def __init__(self, id: _Optional[str] = ..., state: _Optional[str] = ..., members: _Optional[_Iterable[int]] = ..., primary: _Optional[int] = ..., labels: _Optional[_Union[_broker_pb2.LabelSet, _Mapping]] = ..., read_through: _Optional[_Mapping[str, int]] = ..., lag_bytes: _Optional[int] = ..., lag_s: _Optional[float] = ..., recovered_bytes: _Optional[int] = ..., recovery_bytes: _Optional[int] = ..., watermark_us: _Optional[int] = ..., error: _Optional[str] = ..., recovery_log: _Optional[str] = ...) -> None: ...
    class StatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    APPLICATION_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    header: _broker_pb2.Header
    application: str
    members: _containers.RepeatedCompositeFieldContainer[_broker_pb2.ProcessSpec.ID]
    rows: _containers.RepeatedCompositeFieldContainer[ShardsPageResponse.Row]
    total: int
    states: _containers.ScalarMap[str, int]
    next: str
    revision: int
    def __init__(self, header: _Optional[_Union[_broker_pb2.Header, _Mapping]] = ..., application: _Optional[str] = ..., members: _Optional[_Iterable[_Union[_broker_pb2.ProcessSpec.ID, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[ShardsPageResponse.Row, _Mapping]]] = ..., total: _Optional[int] = ..., states: _Optional[_Mapping[str, int]] = ..., next: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("local",)
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    local: bool
    def __init__(self, local: _Optional[bool] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("processes", "lag_bytes", "lag_seconds", "shards_with_lag")
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    LAG_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_WITH_LAG_FIELD_NUMBER: _ClassVar[int]
    processes: int
    lag_bytes: int
    lag_seconds: float
    shards_with_lag: int
    def __init__(self, processes: _Optional[int] = ..., lag_bytes: _Optional[int] = ..., lag_seconds: _Optional[float] = ..., shards_with_lag: _Optional[int] = ...) -> None: ...

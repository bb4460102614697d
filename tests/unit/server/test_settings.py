import re

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_sdk.server.options import Sources, load, print_config
from gazette_sdk.server.settings import BROKER, DEBUG, ETCD, LOGGING, BrokerSettings, pet_name

OPTIONS = [
    # option, INI key, environment, default
    ("broker.zone", "Zone", "BROKER_ZONE", "local"),
    ("broker.id", "ID", "BROKER_ID", ""),
    ("broker.host", "Host", "BROKER_HOST", ""),
    ("broker.port", "Port", "BROKER_PORT", ""),
    ("broker.advertise-port", "AdvertisePort", "BROKER_ADVERTISE_PORT", 0),
    ("broker.server-cert-file", "ServerCertFile", "BROKER_SERVER_CERT_FILE", ""),
    ("broker.server-cert-key-file", "ServerCertKeyFile", "BROKER_SERVER_CERT_KEY_FILE", ""),
    ("broker.server-ca-file", "ServerCAFile", "BROKER_SERVER_CA_FILE", ""),
    ("broker.peer-cert-file", "PeerCertFile", "BROKER_PEER_CERT_FILE", ""),
    ("broker.peer-cert-key-file", "PeerCertKeyFile", "BROKER_PEER_CERT_KEY_FILE", ""),
    ("broker.peer-ca-file", "PeerCAFile", "BROKER_PEER_CA_FILE", ""),
    ("broker.max-grpc-recv-size", "MaxGRPCRecvSize", "BROKER_MAX_GRPC_RECV_SIZE", 4194304),
    ("broker.max-peer-connections", "MaxPeerConnections", "BROKER_MAX_PEER_CONNECTIONS", 4096),
    ("broker.max-peer-calls", "MaxPeerCalls", "BROKER_MAX_PEER_CALLS", 16384),
    ("broker.allow-origin", "AllowOrigin", "BROKER_ALLOW_ORIGIN", ()),
    ("broker.allow-host", "AllowHost", "BROKER_ALLOW_HOST", ()),
    ("broker.limit", "Limit", "BROKER_LIMIT", 1024),
    ("broker.console", "Console", "BROKER_CONSOLE", "on"),
    ("broker.watch-delay", "WatchDelay", "BROKER_WATCH_DELAY", 0.03),
    ("broker.auth-keys", "AuthKeys", "BROKER_AUTH_KEYS", ""),
    ("broker.auth-keys-file", "AuthKeysFile", "BROKER_AUTH_KEYS_FILE", ""),
    ("broker.file-root", "FileRoot", "BROKER_FILE_ROOT", ""),
    ("broker.file-only", "FileOnly", "BROKER_FILE_ONLY", False),
    ("broker.max-append-rate", "MaxAppendRate", "BROKER_MAX_APPEND_RATE", 0),
    ("broker.max-replication", "MaxReplication", "BROKER_MAX_REPLICATION", 9),
    ("broker.min-append-rate", "MinAppendRate", "BROKER_MIN_APPEND_RATE", 65536),
    ("broker.audit", "Audit", "BROKER_AUDIT", "refusals"),
    ("broker.audit-journal", "AuditJournal", "BROKER_AUDIT_JOURNAL", ""),
    ("broker.tracing", "Tracing", "BROKER_TRACING", "off"),
    ("broker.allow-store", "AllowStore", "BROKER_ALLOW_STORE", ()),
    ("broker.auto-suspend", "AutoSuspend", "BROKER_AUTO_SUSPEND", False),
    ("broker.mirror-specs", "MirrorSpecs", "BROKER_MIRROR_SPECS", False),
    ("broker.prune", "Prune", "BROKER_PRUNE", "true"),
    ("broker.spool-dir", "SpoolDir", "BROKER_SPOOL_DIR", ""),
    ("broker.durability", "Durability", "BROKER_DURABILITY", "replicated"),
    (
        "broker.consumers-prefix",
        "ConsumersPrefix",
        "BROKER_CONSUMERS_PREFIX",
        "/gazette/consumers",
    ),
    ("broker.application", "Application", "BROKER_APPLICATION", ()),
    ("etcd.address", "Address", "ETCD_ADDRESS", "http://localhost:2379"),
    ("etcd.cert-file", "CertFile", "ETCD_CERT_FILE", ""),
    ("etcd.cert-key-file", "CertKeyFile", "ETCD_CERT_KEY_FILE", ""),
    ("etcd.trusted-ca-file", "TrustedCAFile", "ETCD_TRUSTED_CA_FILE", ""),
    ("etcd.user", "User", "ETCD_USER", ""),
    ("etcd.password", "Password", "ETCD_PASSWORD", ""),
    ("etcd.password-file", "PasswordFile", "ETCD_PASSWORD_FILE", ""),
    ("etcd.lease", "LeaseTTL", "ETCD_LEASE_TTL", 20.0),
    ("etcd.prefix", "Prefix", "ETCD_PREFIX", "/gazette/cluster"),
    ("log.level", "Level", "LOG_LEVEL", "warn"),
    ("log.format", "Format", "LOG_FORMAT", "text"),
    ("debug.port", "Port", "DEBUG_PORT", ""),
    ("debug.private", "Private", "DEBUG_PRIVATE", False),
]


def test_every_option_has_its_names_and_its_default():
    groups = (BROKER, ETCD, LOGGING, DEBUG)
    assert [
        (bound.long, bound.option.key, bound.env, bound.default)
        for group in groups
        for bound in group.options
    ] == OPTIONS
    assert [group.title for group in groups] == ["Broker", "Etcd", "Logging", "Debug"]


def test_defaults_print_as_comments_only():
    printed = print_config([(group, load(group, Sources())) for group in (BROKER, ETCD)])
    assert all(line[:1] in {"", ";", "["} for line in printed.splitlines())
    assert "; WatchDelay = 30ms" in printed
    assert "; LeaseTTL = 20s" in printed


def test_file_only_without_a_root_is_refused():
    arguments = {"broker.file-only": ["true"]}
    with pytest.raises(ConfigurationError, match="file root must be defined"):
        load(BROKER, Sources(arguments))
    assert load(BROKER, Sources({**arguments, "broker.file-root": ["/x"]})).file_only


def test_an_audit_journal_is_the_name_of_one_and_gets_records():
    arguments = {"broker.audit-journal": ["ops/audit"]}
    assert load(BROKER, Sources(arguments)).audit_journal == "ops/audit"
    with pytest.raises(ConfigurationError, match=r"no effect with --broker\.audit off"):
        load(BROKER, Sources({**arguments, "broker.audit": ["off"]}))
    with pytest.raises(ConfigurationError, match=r"--broker\.audit-journal"):
        load(BROKER, Sources({"broker.audit-journal": ["/ops//audit"]}))


@pytest.mark.parametrize(
    ("option", "value"),
    [("limit", "131073"), ("limit", "-1"), ("max-replication", "0"), ("watch-delay", "-1s")],
)
def test_values_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigurationError, match=f"--broker.{option}"):
        load(BROKER, Sources({f"broker.{option}": [value]}))


def test_keys_are_not_in_the_text_form():
    values = load(BROKER, Sources({"broker.auth-keys": ["c2VjcmV0LWtleQ=="]}))
    assert "c2VjcmV0" not in repr(values)


@pytest.mark.parametrize("keys", [" ", ",", "AA==", "AQ==", "c2VjcmV0", "c2VjcmV0LWtleQ== AQ=="])
@pytest.mark.parametrize("source", ["flag", "environment"])
def test_keys_that_do_not_protect_are_refused(keys, source):
    sources, name = Sources({"broker.auth-keys": [keys]}), "--broker.auth-keys"
    if source == "environment":
        name = "BROKER_AUTH_KEYS"
        sources = Sources(environ={name: keys})
    with pytest.raises(ConfigurationError, match=f"{name}: .*openssl rand -base64 32"):
        load(BROKER, sources)


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("server-ca-file", "server-cert-file"),
        ("server-cert-key-file", "server-cert-file"),
        ("peer-cert-key-file", "peer-cert-file"),
    ],
)
def test_a_file_without_its_certificate_is_refused(given, missing):
    arguments = {f"broker.{given}": ["a.pem"]}
    with pytest.raises(ConfigurationError, match=f"{given} has no .*--broker.{missing}: set"):
        load(BROKER, Sources(arguments))
    load(BROKER, Sources({**arguments, f"broker.{missing}": ["b.pem"]}))


@pytest.mark.parametrize("given", ["cert-file", "cert-key-file", "trusted-ca-file"])
@pytest.mark.parametrize(
    "address", ["http://etcd:2379", "unix:///etcd", "https://a:1, http://b:1", None]
)
def test_certificates_for_an_etcd_without_tls_are_refused(given, address):
    arguments = {f"etcd.{given}": ["a.pem"]}
    if address is not None:
        arguments["etcd.address"] = [address]
    with pytest.raises(ConfigurationError, match=f"--etcd.{given} has no .*write an https://"):
        load(ETCD, Sources(arguments))


def test_a_certificate_for_etcd_needs_its_key():
    https = {"etcd.address": ["https://etcd:2379, https://other:2379"]}
    load(ETCD, Sources({**https, "etcd.trusted-ca-file": ["ca.pem"]}))
    files = {"etcd.cert-file": ["a.pem"], "etcd.cert-key-file": ["b.pem"]}
    load(ETCD, Sources({**https, **files}))
    with pytest.raises(ConfigurationError, match=r"set --etcd.cert-key-file, too"):
        load(ETCD, Sources({**https, "etcd.cert-file": ["a.pem"]}))
    with pytest.raises(ConfigurationError, match=r"set --etcd.cert-file, too"):
        load(ETCD, Sources({**https, "etcd.cert-key-file": ["a.pem"]}))


def test_a_random_name_has_two_words():
    assert re.fullmatch("[a-z]+-[a-z]+", pet_name())


def test_the_advertised_host_is_this_machine_by_default():
    assert load(BROKER, Sources()).advertise_host
    assert load(BROKER, Sources({"broker.host": ["h.example"]})).advertise_host == "h.example"


@pytest.mark.parametrize(
    ("group", "option", "value", "text"),
    [
        (BROKER, "broker.id", "x/y", "invalid length"),
        (BROKER, "broker.id", "not valid", "not a valid token"),
        (BROKER, "broker.zone", "a,b", "not a valid token"),
        (BROKER, "broker.port", "99999", "is no port"),
        (BROKER, "broker.port", "unix://name", "names no socket"),
        (DEBUG, "debug.port", "x", "is no port"),
        (ETCD, "etcd.address", "http://etcd:2379,foo", "'foo' is no Etcd address"),
        (ETCD, "etcd.prefix", "bad", "cannot be a prefix"),
    ],
)
def test_what_cannot_be_used_is_refused_by_the_name_of_its_option(group, option, value, text):
    with pytest.raises(ConfigurationError, match=f"^--{option}: .*{text}"):
        load(group, Sources(arguments={option: [value]}))


def test_applications_have_a_name_and_the_address_of_a_process():
    given = BrokerSettings(application=("totals=http://totals:80", "rides=unix://host/run/rides"))
    assert given.applications == (
        ("totals", "http://totals:80"),
        ("rides", "unix://host/run/rides"),
    )
    for wrong in ("totals", "totals=", "totals=no-url", "http://totals:80", "=http://a:80"):
        with pytest.raises(ValueError, match="write NAME=URL"):
            BrokerSettings(application=(wrong,))

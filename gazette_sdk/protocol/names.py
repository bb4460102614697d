"""Names, tokens and path components (protocol section 4).

Lengths are counted in UTF-8 bytes, character classes are those of code points. No character at or
below ``#`` is in either class, because ``#`` separates the parts of Etcd keys.

URLs of fragment stores and of processes are here, too (protocol section 8). Store schemes of the
wire contract are ``s3``, ``gs``, ``azure``, ``azure-ad`` and ``file``. This SDK has more, which
other implementations refuse: ``abfs`` and ``az``, fsspec's names of ``azure`` (also
``abfs://container@account.dfs.core.windows.net/``), ``hdfs`` and ``webhdfs``, Hadoop's file system
by its native and its HTTP protocol, and ``memory``, an in-process store for tests and notebooks.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from gazette_sdk.errors import ValidationError

JOURNAL_LENGTH_BYTES = (4, 512)
"""Bounds of a journal's name."""
METADATA_LENGTH_BYTES = (1, 512)
"""Bounds of the metadata after a journal name's first ``;``."""

# `\w` is exactly the Unicode letters (L*), the Unicode numbers (N*) and the underscore.
TOKEN_CLASS = r"[\w\-+/.]"  # noqa: S105 - a class of characters, not a secret
PATH_CLASS = r"[\w\-+/.=%]"

_TOKEN = re.compile(f"{TOKEN_CLASS}*").fullmatch
_PATH = re.compile(f"{PATH_CLASS}*").fullmatch


@functools.lru_cache(maxsize=1024)  # the same few names stand in message after message
def validate_journal(name: str, path: str = "journal") -> None:
    """Check a journal's name, which may carry ``;metadata``.

    A leading ``../`` is lexically clean and passes here, as it does in other implementations;
    specs that are applied refuse it (see :func:`refuse_climbing`).

    Args:
        name: the name.
        path: dotted path of the field, for the error.

    Raises:
        ValidationError: kinds ``invalid_length``, ``invalid_token``, ``not_clean``,
            ``leading_slash``.
    """
    bare, separator, metadata = name.partition(";")
    validate_path_component(bare, path, *JOURNAL_LENGTH_BYTES)
    if separator:
        validate_path_component(metadata, at(path, "metadata"), *METADATA_LENGTH_BYTES)


def strip_meta(name: str) -> str:
    """Return a journal name without its metadata."""
    return name.partition(";")[0]


def validate_token(value: str, path: str, least: int, most: int) -> None:
    """Check a token: ``least`` to ``most`` bytes of letters, numbers and ``-_+/.``.

    Raises:
        ValidationError: kinds ``invalid_length`` (checked first), ``invalid_token``.
    """
    _validate_length(value, path, least, most)
    if not _TOKEN(value):
        raise ValidationError(
            f"not a valid token ({value!r}); use letters, numbers and -_+/.",
            kind="invalid_token",
            path=path,
        )


def validate_path_characters(value: str, path: str, least: int, most: int) -> None:
    """Check ``least`` to ``most`` bytes of a token's characters, ``=`` and ``%``.

    Raises:
        ValidationError: kinds ``invalid_length`` (checked first), ``invalid_token``.
    """
    _validate_length(value, path, least, most)
    if not _PATH(value):
        raise ValidationError(
            f"not made of path characters ({value!r}); use letters, numbers and -_+/.=%",
            kind="invalid_token",
            path=path,
        )


def validate_path_component(value: str, path: str, least: int, most: int) -> None:
    """Check a clean, relative path of ``least`` to ``most`` bytes.

    Raises:
        ValidationError: kinds in checking order ``invalid_length``, ``invalid_token``,
            ``not_clean``, ``leading_slash``.
    """
    validate_path_characters(value, path, least, most)
    if not value or (
        value[0] not in "./" and value[-1] != "/" and "//" not in value and "/." not in value
    ):
        return  # cleaning would change nothing
    if clean_path(value) != value:
        raise ValidationError(
            f"must be a clean path ({value!r}: no `//`, no `.`, no trailing `/`)",
            kind="not_clean",
            path=path,
        )
    if value[0] == "/":
        raise ValidationError(
            f"must not begin with `/` ({value!r})", kind="leading_slash", path=path
        )


def clean_path(value: str) -> str:
    """Return the shortest path that is lexically equal to a slash-separated path.

    Empty and ``.`` components are removed, ``..`` removes the component before it, and at the
    beginning of a rooted path it is removed too. The empty path is ``.``.
    """
    rooted = value.startswith("/")
    kept: list[str] = []
    for component in value.split("/"):
        if component in {"", "."}:
            continue
        if component != "..":
            kept.append(component)
        elif kept and kept[-1] != "..":
            kept.pop()
        elif not rooted:
            kept.append(component)
    cleaned = "/".join(kept)
    return "/" + cleaned if rooted else cleaned or "."


def climbs(value: str) -> bool:
    """Return True if a component of the path is ``..``."""
    return ".." in value and ".." in value.split("/")


def refuse_climbing(value: str, path: str) -> None:
    """Refuse a path that has a ``..`` component: it could leave the root it is joined to.

    Raises:
        ValidationError: kind ``traverses_outside``.
    """
    if climbs(value):
        raise ValidationError(
            f"must not have a `..` component ({value!r})", kind="traverses_outside", path=path
        )


def at(path: str, field: str) -> str:
    """Return the dotted path of a field of the value at ``path``."""
    return f"{path}.{field}" if path else field


def _validate_length(value: str, path: str, least: int, most: int) -> None:
    length = len(value)
    if not value.isascii():
        try:
            length = len(value.encode())
        except UnicodeEncodeError:
            raise ValidationError(
                f"not valid UTF-8 ({value!r})", kind="invalid_token", path=path
            ) from None
    if not least <= length <= most:
        raise ValidationError(
            f"invalid length ({length}; expected {least} <= length <= {most} bytes)",
            kind="invalid_length",
            path=path,
        )


STORE_SCHEMES = (
    "s3",
    "gs",
    "azure",
    "azure-ad",
    "abfs",
    "az",
    "hdfs",
    "webhdfs",
    "file",
    "memory",
)
"""Schemes of fragment stores."""

_AZURE_SCHEMES = frozenset({"azure", "abfs", "az"})
_COMMON_ARGUMENTS = frozenset({"find", "replace"})
_S3_ARGUMENTS = frozenset(
    {"profile", "endpoint", "acl", "storageclass", "sse", "ssekmskeyid", "region"}
)
_ARGUMENTS: Mapping[str, frozenset[str]] = {
    "s3": _COMMON_ARGUMENTS | _S3_ARGUMENTS,
    "hdfs": _COMMON_ARGUMENTS | {"user"},
    "webhdfs": _COMMON_ARGUMENTS | {"user", "tls", "kerberos"},
}
"""Arguments of the schemes that have more than the common ones."""


# ---------------------------------------------------------------- fragment stores


@dataclass(frozen=True, slots=True)
class StoreURL:
    """Parts of a fragment store's URL.

    Attributes:
        url: the whole text, which is the store's identity.
        scheme: in lower case; one of :data:`STORE_SCHEMES`.
        bucket: bucket of ``s3`` and ``gs``, container of all Azure schemes, host and port of the
            NameNode of ``hdfs`` and ``webhdfs``, name of a ``memory`` store; empty for ``file``.
        prefix: path below which content lies, percent-decoded, without leading ``/``; either
            empty or ending in ``/``. For ``file`` it is relative to the process's file root.
        account: Azure storage account, where the URL names one.
        container: the same as ``bucket`` for Azure schemes, else empty.
        tenant: tenant id of ``azure-ad``, else empty.
        arguments: query keys in lower case with their last value, unless that is empty; also
            those in ``unknown_arguments``.
        unknown_arguments: query keys that make the store's construction fail.
    """

    url: str
    scheme: str
    bucket: str = ""
    prefix: str = ""
    account: str = ""
    container: str = ""
    tenant: str = ""
    arguments: Mapping[str, str] = field(default_factory=dict)
    unknown_arguments: tuple[str, ...] = ()

    @property
    def public(self) -> str:
        """The URL for texts: without a password, and without values that may be secrets.

        These are values of unknown arguments, such as a signature, and of URLs with a user.
        """
        bare, mark, query = self.url.partition("?")
        shown = [
            name + equals + (value if self._is_public(unquote(name).lower(), value) else "…")
            for name, equals, value in (pair.partition("=") for pair in query.split("&"))
        ]
        return without_queries(bare) + mark + "&".join(shown)

    def _is_public(self, name: str, value: str) -> bool:
        return name not in self.unknown_arguments and "@" not in unquote(value)

    def rewrite(self, path: str) -> str:
        """Return a content path, rewritten by the URL's ``find`` and ``replace``."""
        find = self.arguments.get("find", "")
        return rewrite_path(find, self.arguments.get("replace", ""), path)

    def key(self, path: str) -> str:
        """Return the object key of a content path: the prefix, and the rewritten path."""
        return self.prefix + self.rewrite(path)


_QUERY = re.compile(r"""(\bhttps?://[^\s?"'<>]*|(?<![\w:/.])/[^\s?"'<>]*)\?[^\s"'<>)]+""")
_PASSWORD = re.compile(r"""(://)[^\s/@"'<>]*:[^\s/@"'<>]*@""")


def without_queries(text: str) -> str:
    """Return a text, such as an error's, without queries and passwords of the URLs in it.

    A query may hold a token or a signature, and texts go to clients and logs.
    """
    return _PASSWORD.sub(r"\1…@", _QUERY.sub(r"\1?…", text))


def validate_store_url(url: str, path: str = "", *, stored: bool = False) -> None:
    """Check a fragment store's URL. Unknown query keys pass here and fail when the store is opened.

    Args:
        url: the URL.
        path: dotted path of the field, for the error.
        stored: True if the URL is stored already; then ``..`` in its path passes, as it does in
            other implementations.

    Raises:
        ValidationError: kind ``url_parse``, ``not_absolute``, ``missing_bucket``,
            ``missing_tenant``, ``missing_account``, ``missing_container``, ``file_has_host``,
            ``invalid_scheme``, ``no_trailing_slash``, ``traverses_outside``.
    """
    try:
        store = parse_store_url(url)
    except ValidationError as error:
        raise (error.within(path) if path else error) from None
    if not stored and climbs(store.prefix + "/" + store.arguments.get("replace", "")):
        raise ValidationError(
            f"must not have a `..` component in its path or replacement ({url!r})",
            kind="traverses_outside",
            path=path,
        )


@lru_cache(maxsize=1024)
def parse_store_url(url: str) -> StoreURL:
    """Return the parts of a fragment store's URL.

    Raises:
        ValidationError: as :func:`validate_store_url`, but for ``..`` in its path.
    """
    parts = _split(url, "")
    if not parts.scheme:
        raise ValidationError(
            f"not absolute ({url!r}); a store is a URL such as s3://bucket/prefix/ or file:///",
            kind="not_absolute",
        )
    named = _NAMED_BY[parts.scheme](parts) if parts.scheme in _NAMED_BY else None
    if named is None:
        raise ValidationError(
            f"invalid scheme ({parts.scheme}; expected one of {', '.join(STORE_SCHEMES)})",
            kind="invalid_scheme",
        )
    if not parts.path.endswith("/"):
        raise ValidationError(
            f"path component doesn't end in '/' ({parts.path!r})", kind="no_trailing_slash"
        )
    given = {key.lower(): value for key, value in parse_qsl(parts.query, keep_blank_values=True)}
    known = _ARGUMENTS.get(parts.scheme, _COMMON_ARGUMENTS)
    return StoreURL(
        url=url,
        scheme=parts.scheme,
        bucket=named.bucket,
        prefix=named.prefix,
        account=named.account,
        container=named.bucket if parts.scheme in _AZURE_SCHEMES | {"azure-ad"} else "",
        tenant=named.tenant,
        arguments=MappingProxyType({key: value for key, value in given.items() if value}),
        unknown_arguments=tuple(sorted(given.keys() - known)),
    )


def rewrite_path(find: str, replace: str, path: str) -> str:
    """Return a content path with the first occurrence of a non-empty ``find`` replaced.

    Raises:
        ValidationError: kind ``traverses_outside``: the rewritten path has a ``..`` component.
    """
    if not find:
        return path
    rewritten = path.replace(find, replace, 1)
    if climbs(rewritten):
        raise ValidationError(
            f"rewritten path must not have a `..` component ({rewritten!r})",
            kind="traverses_outside",
        )
    return rewritten


@dataclass(frozen=True, slots=True)
class _Named:
    bucket: str = ""
    prefix: str = ""
    account: str = ""
    tenant: str = ""


def _name_bucket(parts: SplitResult) -> _Named:
    host = _host(parts)
    if not host:
        raise ValidationError(f"missing bucket ({parts.geturl()!r})", kind="missing_bucket")
    return _Named(bucket=host, prefix=_prefix(parts))


def _name_hadoop(parts: SplitResult) -> _Named:
    host = _host(parts)
    if not host.partition(":")[0]:
        raise ValidationError(
            f"missing host of the NameNode ({parts.geturl()!r})", kind="missing_host"
        )
    return _Named(bucket=host, prefix=_prefix(parts))


def _name_azure(parts: SplitResult) -> _Named:
    container, at_sign, account_host = parts.netloc.rpartition("@")
    if not at_sign:
        return _name_bucket(parts)
    return _Named(
        bucket=unquote(container), prefix=_prefix(parts), account=account_host.partition(".")[0]
    )


def _name_azure_ad(parts: SplitResult) -> _Named:
    if not parts.netloc:
        raise ValidationError("missing tenant id in the host", kind="missing_tenant")
    segments = unquote(parts.path).removeprefix("/").split("/", 2)
    account, container, prefix = (*segments, "", "")[:3]
    if not account:
        raise ValidationError(
            "missing storage account in the path's first segment", kind="missing_account"
        )
    if not container:
        raise ValidationError(
            "missing container in the path's second segment", kind="missing_container"
        )
    return _Named(bucket=container, prefix=prefix, account=account, tenant=_host(parts))


def _name_file(parts: SplitResult) -> _Named:
    if parts.netloc:
        raise ValidationError(
            f"file scheme cannot have a host ({parts.netloc!r}): write file:///{parts.netloc}"
            f"{parts.path}",
            kind="file_has_host",
        )
    return _Named(prefix=_prefix(parts))


def _name_memory(parts: SplitResult) -> _Named:
    return _Named(bucket=_host(parts), prefix=_prefix(parts))


_NAMED_BY = {
    "s3": _name_bucket,
    "gs": _name_bucket,
    **dict.fromkeys(_AZURE_SCHEMES, _name_azure),
    "azure-ad": _name_azure_ad,
    "hdfs": _name_hadoop,
    "webhdfs": _name_hadoop,
    "file": _name_file,
    "memory": _name_memory,
}


def _host(parts: SplitResult) -> str:
    return unquote(parts.netloc.rpartition("@")[2])


def _prefix(parts: SplitResult) -> str:
    return unquote(parts.path).removeprefix("/")


# ---------------------------------------------------------------- endpoints


def validate_endpoint(url: str, path: str = "") -> None:
    """Check the URL of a process.

    Raises:
        ValidationError: kind ``url_parse``, ``not_absolute`` or ``missing_host``.
    """
    try:
        _check_endpoint(url)
    except ValidationError as error:
        raise (error.within(path) if path else error) from None


@lru_cache(maxsize=1024)  # the headers of all calls have the same few endpoints
def _check_endpoint(url: str) -> None:
    parts = _split(url, "")
    if not parts.scheme:
        raise ValidationError(f"not absolute ({url!r})", kind="not_absolute")
    if not _host(parts):
        raise ValidationError(f"missing host ({url!r})", kind="missing_host")


def dial_address(endpoint: str) -> str:
    """Return the gRPC target of an endpoint: ``host:port`` or ``unix:///path``.

    Args:
        endpoint: a valid endpoint. Without a port, ``https`` means 443 and ``http`` means 80.

    Raises:
        ValidationError: the endpoint is no URL.
    """
    parts = _split(endpoint, "")
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme == "unix":
        return f"unix://{unquote(parts.path)}"
    if not _PORT.search(host):
        if parts.scheme == "https":
            return f"{host}:443"
        if parts.scheme == "http":
            return f"{host}:80"
    return host


def is_tls(endpoint: str) -> bool:
    """Return True if connections to an endpoint use TLS."""
    return endpoint.partition(":")[0].lower() == "https"


def is_local(endpoint: str) -> bool:
    """Return True if connections to an endpoint stay on this machine: a socket, or loopback.

    Raises:
        ValidationError: the endpoint is no URL.
    """
    parts = _split(endpoint, "")
    if parts.scheme == "unix":
        return True
    host = parts.hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def may_send_token(ours: str, endpoint: str) -> bool:
    """Return True if a caller's token may be sent on: not from TLS to a network without it.

    Args:
        ours: endpoint at which the token was received.
        endpoint: that of the member.
    """
    return not is_tls(ours) or is_tls(endpoint) or is_local(endpoint)


# ---------------------------------------------------------------- URLs

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(?=:)")
_BAD_ESCAPE = re.compile(r"%(?![0-9a-fA-F]{2})")
_PORT = re.compile(r":\d*\Z", re.ASCII)
_BAD_HOST = re.compile(r"[\x00-\x20\"#<>?\\^`{|}/@]")
_BAD_USER = re.compile(r"[^A-Za-z0-9\-._:~!$&'()*+,;=%@]")


def validate_url(url: str, path: str = "") -> None:
    """Check that a text is a URL, absolute or not.

    Raises:
        ValidationError: kind ``url_parse``.
    """
    _split(url, path)


def _split(url: str, path: str) -> SplitResult:
    """Return the parts of a URL. It is stricter than ``urlsplit``, like other implementations."""
    fault = _fault(url)
    if not fault:
        try:
            return urlsplit(url)
        except ValueError as error:
            fault = str(error)
    raise ValidationError(f"not a URL ({url!r}: {fault})", kind="url_parse", path=path)


def _fault(url: str) -> str:
    if _CONTROLS.search(url):
        return "control character"
    bare = url.partition("#")[0].partition("?")[0]
    scheme = _SCHEME.match(bare)
    rest = bare[scheme.end() + 1 :] if scheme else bare
    if not scheme and bare.startswith(":"):
        return "missing scheme"
    if not scheme and ":" in rest.partition("/")[0]:
        return "first path segment cannot contain a colon"
    if scheme and not rest.startswith("/"):
        return ""  # opaque, such as mailto:somebody
    if rest.startswith("//"):
        authority, _, rest = rest[2:].partition("/")
        if fault := _authority_fault(authority):
            return fault
    return "invalid percent-escape" if _BAD_ESCAPE.search(rest) else ""


def _authority_fault(authority: str) -> str:
    user, at_sign, host = authority.rpartition("@")
    if at_sign and _BAD_USER.search(user):
        return "invalid user information"
    _, bracket, after = host.rpartition("]")
    if host.startswith("["):
        if not bracket:
            return "missing ']' in host"
        if after and not _PORT.fullmatch(after):
            return "invalid port"
    elif ":" in host and not _PORT.fullmatch(host[host.rindex(":") :]):
        return "invalid port"
    if _BAD_HOST.search(host) or _BAD_ESCAPE.search(host):
        return "invalid character in host"
    return ""

"""Amazon S3, and stores with its protocol, through s3fs (broker section 15)."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from typing import Any, BinaryIO, Final

import aiohttp
import botocore.exceptions
import botocore.session
from fsspec.asyn import get_loop, sync
from s3fs import S3FileSystem

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.stores.base import (
    CONNECT_TIMEOUT_S,
    PUT_TIMEOUT_S,
    READ_TIMEOUT_S,
    ObjectStatus,
    ObjectStore,
    StoredObject,
    describe,
    read_exactly,
)
from gazette_sdk.protocol.names import StoreURL

_log = logging.getLogger(__name__)

_PART_BYTES: Final = 64 << 20
"""Size of a part of a large upload: the largest fragment (16 GiB) then has 256 of 10,000 parts."""

_CREDENTIAL_CODES: Final = frozenset(
    {
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
        "TokenRefreshRequired",
    }
)
"""Codes of bad credentials, not of missing permissions, although S3 sends some of them as 403."""

_MD5: Final = re.compile("[0-9a-f]{32}")
_REFUSALS: Final = frozenset({"NoSuchBucket", "AccessDenied", "AllAccessDisabled", "403"})
_TRANSIENT: Final = frozenset(
    {"SlowDown", "InternalError", "RequestTimeout", "ServiceUnavailable", "ThrottlingException"}
)


class S3Store(ObjectStore):
    """A bucket of S3.

    Arguments of the URL: ``profile``, ``region``, ``endpoint`` (then with path-style addresses),
    ``acl``, ``storageclass``, ``sse``, ``ssekmskeyid``. Credentials are those of AWS tools:
    environment, profile, container or instance.

    Raises:
        StoreError: the profile is unknown, or no region is given.
    """

    remedy = (
        "check the network, the URL's `endpoint` and `region`, and the credentials "
        "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or `profile`)"
    )
    authorization_remedy = (
        "check that the bucket exists, and that the credentials may get, put, list and delete"
    )

    def __init__(self, parsed: StoreURL) -> None:
        super().__init__(parsed)
        arguments = parsed.arguments
        self._bucket = parsed.bucket
        endpoint = arguments.get("endpoint")
        config: dict[str, Any] = {
            "connect_timeout": CONNECT_TIMEOUT_S,
            "read_timeout": READ_TIMEOUT_S,
            "retries": {"total_max_attempts": 1},  # ObjectStore retries, for all stores
            "signature_version": "s3v4",
            "max_pool_connections": 64,
        }
        if endpoint:
            config["s3"] = {"addressing_style": "path"}
            # Many other servers of the protocol refuse newer checksums.
            config["request_checksum_calculation"] = "when_required"
            config["response_checksum_validation"] = "when_required"
        stored = {
            "ACL": arguments.get("acl"),
            "StorageClass": arguments.get("storageclass"),
            "ServerSideEncryption": arguments.get("sse"),
            "SSEKMSKeyId": arguments.get("ssekmskeyid"),
        }
        self._stored_as = {name: value for name, value in stored.items() if value}
        self._fs = S3FileSystem(
            endpoint_url=endpoint,
            client_kwargs={"region_name": self._region()},
            config_kwargs=config,
            use_listings_cache=False,
            skip_instance_cache=True,
            **({"profile": arguments["profile"]} if "profile" in arguments else {}),
        )
        self._fs.retries = 1

    def close(self) -> None:
        """Close the connections."""
        client = self._fs._s3creator if self._fs._s3 is not None else None  # noqa: SLF001
        if client is not None:
            sync(get_loop(), client.__aexit__, None, None, None, timeout=CONNECT_TIMEOUT_S)

    def _region(self) -> str:
        arguments = self._parsed.arguments
        try:
            session = botocore.session.Session(profile=arguments.get("profile"))
            session.get_scoped_config()  # raises if there is no such profile
            found = (
                arguments.get("region")
                or os.environ.get("AWS_REGION")
                or session.get_config_variable("region")
            )
        except botocore.exceptions.BotoCoreError as error:
            raise StoreError(
                f"{self._parsed.public}: {describe(error)}; name a profile of ~/.aws/config",
                store=self.url,
            ) from error
        if not found:
            raise StoreError(
                f"{self._parsed.public}: no region; add `?region=…` to the URL, or set AWS_REGION",
                store=self.url,
            )
        return str(found)

    # ---------------------------------------------------------- operations

    def _sign_get(self, key: str, ttl_s: float) -> str:
        async def presign() -> str:
            await self._fs.set_session()
            url: str = await self._fs.s3.generate_presigned_url(
                "get_object",
                Params={"Bucket": self._bucket, "Key": key},
                ExpiresIn=max(1, int(ttl_s)),
            )
            return url

        return self._call(presign)

    async def _head(self, key: str) -> ObjectStatus | None:
        try:
            found = await self._request("head_object", Key=key)
        except FileNotFoundError:
            return None
        return ObjectStatus(
            found["ContentLength"],
            found.get("ContentEncoding", ""),
            _md5_of(found.get("ETag", "")),
        )

    async def _fetch(self, key: str, begin: int, end: int) -> bytes:
        found = await self._request("get_object", Key=key, Range=f"bytes={begin}-{end - 1}")
        try:
            data: bytes = await found["Body"].read()
        finally:
            found["Body"].close()
        return data

    async def _page(self, prefix: str, token: str | None) -> tuple[list[StoredObject], str | None]:
        more = {"ContinuationToken": token} if token else {}
        found = await self._request("list_objects_v2", Prefix=prefix, **more)
        page = [
            StoredObject(item["Key"], int(item["LastModified"].timestamp()), item["Size"])
            for item in found.get("Contents", ())
        ]
        return page, found["NextContinuationToken"] if found.get("IsTruncated") else None

    def expiring(self, paths: Iterable[str]) -> list[str]:
        """Return the paths below which lifecycle rules of the bucket remove objects.

        Args:
            paths: content paths of directories.

        Raises:
            OSError: the rules cannot be read.
        """
        try:
            found = self._call(lambda: self._request("get_bucket_lifecycle_configuration"))
        except OSError as error:
            if _code(error) == "NoSuchLifecycleConfiguration":
                return []
            raise
        prefixes = [
            _prefix_of(rule)
            for rule in found.get("Rules", ())
            # A rule that removes what is left of deleted objects removes no fragment.
            if rule.get("Status") == "Enabled"
            and rule.get("Expiration", {}).keys() & {"Days", "Date"}
        ]
        return [
            path
            for path in paths
            for key in [self._parsed.key(path.rstrip("/") + "/")]
            if any(key.startswith(each) or each.startswith(key) for each in prefixes)
        ]

    async def _delete(self, key: str) -> None:
        await self._request("delete_object", Key=key)

    def _upload(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        attributes = self._stored_as | (
            {"ContentEncoding": content_encoding} if content_encoding else {}
        )
        condition = {} if overwrite else {"IfNoneMatch": "*"}
        try:
            if length <= _PART_BYTES:
                body = read_exactly(content, length)
                self._send("put_object", condition, Key=key, Body=body, **attributes)
            else:
                self._upload_parts(key, content, length, condition, attributes)
        except OSError as error:
            if overwrite or not self._is_taken(error, key):
                raise

    def _upload_parts(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        condition: dict[str, str],
        attributes: dict[str, str],
    ) -> None:
        upload = self._send("create_multipart_upload", {}, Key=key, **attributes)["UploadId"]
        parts = []
        try:
            for number, begin in enumerate(range(0, length, _PART_BYTES), start=1):
                body = read_exactly(content, min(_PART_BYTES, length - begin))
                sent = self._send(
                    "upload_part", {}, Key=key, UploadId=upload, PartNumber=number, Body=body
                )
                parts.append({"PartNumber": number, "ETag": sent["ETag"]})
            self._send(
                "complete_multipart_upload",
                condition,
                Key=key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
            )
        except BaseException:
            self._abort_upload(key, upload)
            raise

    def _abort_upload(self, key: str, upload: str) -> None:
        """Abort a failed upload: its parts would be kept, and paid for."""
        try:
            with self._new_bound(CONNECT_TIMEOUT_S):
                self._send("abort_multipart_upload", {}, Key=key, UploadId=upload)
        except (OSError, botocore.exceptions.BotoCoreError) as error:
            _log.warning(
                "store %s keeps parts of a failed upload to %r: %s",
                self._parsed.public,
                key,
                describe(error),
            )

    def _send(self, method: str, condition: dict[str, str], **arguments: Any) -> dict[str, Any]:
        """Send a request of an upload; without its condition where the store supports none."""
        try:
            return self._call(
                lambda: self._request(method, **arguments, **condition), limit_s=PUT_TIMEOUT_S
            )
        except OSError as error:
            if not condition or _code(error) not in {"NotImplemented", "501"}:
                raise
        return self._call(lambda: self._request(method, **arguments), limit_s=PUT_TIMEOUT_S)

    def _is_taken(self, error: BaseException, key: str) -> bool:
        """Return True if an upload failed because the object exists."""
        code = _code(error)
        if code in {"PreconditionFailed", "412"}:
            return True
        # Another upload to the same key is in progress, and may have ended meanwhile.
        return code in {"ConditionalRequestConflict", "409"} and bool(self._status_of(key))

    async def _request(self, method: str, **arguments: Any) -> dict[str, Any]:
        found: dict[str, Any] = await self._fs._call_s3(  # noqa: SLF001 - fsspec's async face
            method, Bucket=self._bucket, **arguments
        )
        return found

    # -------------------------------------------------------------- errors

    def _is_refusal(self, error: BaseException) -> bool:
        code, status = _own_code(error), _own_status(error)
        if code in _CREDENTIAL_CODES:
            return False
        return code in _REFUSALS or status == 403

    def _is_missing(self, error: BaseException) -> bool:
        return isinstance(error, FileNotFoundError) and _code(error) != "NoSuchBucket"

    def _is_transient(self, error: BaseException) -> bool:
        cause: BaseException | None = error
        while cause is not None:
            if _own_code(cause) in _TRANSIENT or _own_status(cause) >= 500:
                return _own_code(cause) != "NotImplemented" and _own_status(cause) != 501
            if isinstance(
                cause, (botocore.exceptions.HTTPClientError, aiohttp.ClientError, ConnectionError)
            ):
                return True
            cause = cause.__cause__
        return False


def _prefix_of(rule: dict[str, Any]) -> str:
    """Return the prefix of keys that a lifecycle rule is for."""
    chosen = rule.get("Filter", {})
    return str(
        rule.get("Prefix") or chosen.get("Prefix") or chosen.get("And", {}).get("Prefix", "")
    )


def _md5_of(entity_tag: str) -> bytes:
    """Return the MD5 sum that an entity tag may be: that of an object stored in one part."""
    digits = entity_tag.strip('"')
    return bytes.fromhex(digits) if _MD5.fullmatch(digits) else b""


def _own_code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, dict) else ""


def _own_status(error: BaseException) -> int:
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return int(metadata.get("HTTPStatusCode", 0))


def _code(error: BaseException) -> str:
    """Return the code in the response that caused an error."""
    cause: BaseException | None = error
    while cause is not None:
        if code := _own_code(cause):
            return code
        cause = cause.__cause__
    return ""

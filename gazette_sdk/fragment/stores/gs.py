"""Google Cloud Storage, with the credentials and connections of gcsfs (broker section 15)."""

from __future__ import annotations

import base64
import io
import json
import os
from datetime import timedelta
from typing import Any, BinaryIO, Final
from urllib.parse import quote

import aiohttp
import google.auth.exceptions
from fsspec.asyn import get_loop, sync
from gcsfs import GCSFileSystem
from google.cloud import storage  # type: ignore[import-untyped]
from google.oauth2 import service_account
from yarl import URL

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

_CHUNK_BYTES: Final = 64 << 20
"""Size of a chunk of a large upload; the service requires multiples of 256 KiB."""

_KEY_FILE: Final = "GOOGLE_APPLICATION_CREDENTIALS"
_EMULATOR: Final = "STORAGE_EMULATOR_HOST"


class GCSError(OSError):
    """Error response of the service.

    Attributes:
        code: HTTP status.
        message: the service's text.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"HTTP {code}: {message}")
        self.code = code
        self.message = message


class GCSStore(ObjectStore):
    """A bucket of Google Cloud Storage.

    Credentials are the application's default ones; URLs are signed with the service account's key
    in the file of ``GOOGLE_APPLICATION_CREDENTIALS``. With ``STORAGE_EMULATOR_HOST`` requests are
    sent there, without credentials.

    Raises:
        StoreError: there are no credentials, or they cannot be read.
    """

    remedy = (
        f"check the network, and that {_KEY_FILE} names the key file of a service account "
        "that may use the bucket"
    )
    authorization_remedy = (
        "check that the bucket exists, and that the service account may get, create, list and "
        "delete its objects"
    )

    def __init__(self, parsed: StoreURL) -> None:
        super().__init__(parsed)
        self._bucket = parsed.bucket
        self._key_file = os.environ.get(_KEY_FILE, "")
        try:
            self._fs = GCSFileSystem(
                token="anon" if os.environ.get(_EMULATOR) else "google_default",
                session_kwargs={
                    # Objects with a content encoding are read as they are stored.
                    "auto_decompress": False,
                    "timeout": aiohttp.ClientTimeout(
                        total=PUT_TIMEOUT_S,
                        sock_connect=CONNECT_TIMEOUT_S,
                        sock_read=READ_TIMEOUT_S,
                    ),
                },
                use_listings_cache=False,
                skip_instance_cache=True,
            )
        except google.auth.exceptions.GoogleAuthError as error:
            raise StoreError(
                f"{self._parsed.public}: {describe(error)}; let {_KEY_FILE} name the "
                "key file of a service account",
                store=self.url,
            ) from error
        self._signer: storage.Client | None = None

    def close(self) -> None:
        """Close the connections."""
        session = self._fs._session  # noqa: SLF001 - it has no other way to be closed
        if session is not None:
            sync(get_loop(), session.close, timeout=CONNECT_TIMEOUT_S)

    # ---------------------------------------------------------- operations

    def _sign_get(self, key: str, ttl_s: float) -> str:
        if self._signer is None:
            self._signer = self._make_signer()
        blob = self._signer.bucket(self._bucket).blob(key)
        endpoint = {}
        if emulator := os.environ.get(_EMULATOR):
            endpoint = {"api_access_endpoint": emulator}
        url: str = blob.generate_signed_url(
            version="v4", method="GET", expiration=timedelta(seconds=max(1, ttl_s)), **endpoint
        )
        return url

    def _make_signer(self) -> storage.Client:
        """Return a client that signs URLs: it needs the service account's key, but no request."""
        try:
            credentials = service_account.Credentials.from_service_account_file(  # type: ignore[no-untyped-call]
                self._key_file
            )
        except (OSError, ValueError, google.auth.exceptions.GoogleAuthError) as error:
            raise StoreError(
                f"{self._parsed.public}: URLs cannot be signed: {describe(error)}; let "
                f"{_KEY_FILE} name the key file (JSON) of a service account",
                store=self.url,
            ) from error
        return storage.Client(project=credentials.project_id, credentials=credentials)

    async def _head(self, key: str) -> ObjectStatus | None:
        try:
            _, found = await self._request(
                "GET", self._object(key), {"fields": "size,contentEncoding,md5Hash"}
            )
        except GCSError as error:
            if self._is_missing(error):
                return None
            raise
        attributes = json.loads(found)
        return ObjectStatus(
            int(attributes["size"]),
            attributes.get("contentEncoding", ""),
            base64.b64decode(attributes.get("md5Hash", "")),
        )

    async def _fetch(self, key: str, begin: int, end: int) -> bytes:
        headers = {
            "Range": f"bytes={begin}-{end - 1}",
            # Without this the service decompresses encoded objects, and ignores ranges.
            "Accept-Encoding": "gzip",
        }
        _, data = await self._request("GET", self._object(key), {"alt": "media"}, headers=headers)
        return data

    async def _page(self, prefix: str, token: str | None) -> tuple[list[StoredObject], str | None]:
        query = {
            "prefix": prefix,
            "maxResults": "1000",
            "fields": "items(name,updated,size),nextPageToken",
        }
        if token:
            query["pageToken"] = token
        _, found = await self._of_bucket("GET", f"/storage/v1/b/{quote(self._bucket)}/o", query)
        answer = json.loads(found)
        page = [
            StoredObject(
                item["name"],
                int(self._fs._parse_timestamp(item["updated"]).timestamp()),  # noqa: SLF001
                int(item["size"]),
            )
            for item in answer.get("items", ())
        ]
        return page, answer.get("nextPageToken")

    async def _delete(self, key: str) -> None:
        await self._request("DELETE", self._object(key))

    def _upload(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        attributes = {"name": key, "contentType": "application/octet-stream"}
        if content_encoding:
            attributes["contentEncoding"] = content_encoding
        condition = {} if overwrite else {"ifGenerationMatch": "0"}
        try:
            session = self._call(lambda: self._begin_upload(attributes, condition))
            for begin in range(0, max(length, 1), _CHUNK_BYTES):
                data = read_exactly(content, min(_CHUNK_BYTES, length - begin))
                self._send_chunk(session, data, begin, length)
        except GCSError as error:
            if error.code != 412 or overwrite:  # 412: there is such an object
                raise

    async def _begin_upload(self, attributes: dict[str, str], condition: dict[str, str]) -> str:
        headers, _ = await self._of_bucket(
            "POST",
            f"/upload/storage/v1/b/{quote(self._bucket)}/o",
            {"uploadType": "resumable", "name": attributes["name"], **condition},
            body=json.dumps(attributes).encode(),
            headers={"Content-Type": "application/json"},
        )
        return headers["Location"]

    def _send_chunk(self, session: str, data: bytes, begin: int, length: int) -> None:
        span = f"{begin}-{begin + len(data) - 1}" if data else "*"
        headers = {"Content-Range": f"bytes {span}/{length}"}
        answer, _ = self._call(
            lambda: self._request("PUT", session, body=data, headers=headers), limit_s=PUT_TIMEOUT_S
        )
        end = begin + len(data)
        if end < length and answer.get("Range") != f"bytes=0-{end - 1}":
            raise GCSError(308, f"kept {answer.get('Range')} of the first {end} bytes")

    def _object(self, key: str) -> str:
        return f"/storage/v1/b/{quote(self._bucket)}/o/{quote(key, safe='')}"

    async def _of_bucket(self, *arguments: Any, **more: Any) -> tuple[dict[str, str], bytes]:
        """Send a request that gets status 404 only if the bucket does not exist."""
        try:
            return await self._request(*arguments, **more)
        except GCSError as error:
            if error.code == 404 and not self._is_refusal(error):
                raise GCSError(404, f"no bucket {self._bucket!r}; {error.message}") from error
            raise

    async def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        *,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[dict[str, str], bytes]:
        """Send a request with gcsfs's credentials and session.

        gcsfs's own requests retry for half a minute, and drop the text of the error response.
        """
        fs = self._fs
        session = await fs._set_session()  # noqa: SLF001
        url = URL(path if path.startswith("http") else fs._location + path, encoded=True)  # noqa: SLF001
        async with session.request(
            method,
            url.update_query(query) if query else url,
            headers=fs._get_headers(headers),  # noqa: SLF001
            data=None if body is None else io.BytesIO(body),  # sent without blocking the loop
            allow_redirects=False,  # 308 is the answer to a chunk that is not the last
        ) as answer:
            data = await answer.read()
            if answer.status >= 400:
                raise GCSError(answer.status, _message(data))
            return dict(answer.headers), data

    # -------------------------------------------------------------- errors

    def _is_refusal(self, error: BaseException) -> bool:
        if not isinstance(error, GCSError):
            return False
        # "No such object: NAME-OF-A-BUCKET/…" contains the word, but the object is missing.
        message = error.message.lower()
        of_bucket = "bucket" in message and not message.startswith("no such object")
        return error.code == 403 or (error.code == 404 and of_bucket)

    def _is_missing(self, error: BaseException) -> bool:
        if isinstance(error, GCSError):
            return error.code == 404 and not self._is_refusal(error)
        return isinstance(error, FileNotFoundError)

    def _is_transient(self, error: BaseException) -> bool:
        if isinstance(error, GCSError):
            return error.code in {408, 429} or error.code >= 500
        return isinstance(error, (aiohttp.ClientError, ConnectionError))


def _message(data: bytes) -> str:
    """Return the text in the body of an error response."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return data[:200].decode(errors="replace")

"""Azure Blob Storage, with the credentials and connections of adlfs (broker section 15)."""

from __future__ import annotations

import io
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any, BinaryIO, Final

from adlfs import AzureBlobFileSystem
from azure.core.exceptions import (
    AzureError,
    HttpResponseError,
    IncompleteReadError,
    ResourceExistsError,
    ResourceNotFoundError,
    ServiceRequestError,
    ServiceResponseError,
)
from azure.storage.blob import (
    BlobSasPermissions,
    ContentSettings,
    UserDelegationKey,
    generate_blob_sas,
)
from azure.storage.blob.aio import BlobClient, BlobServiceClient
from fsspec.asyn import get_loop, sync

from gazette_sdk.errors import StoreError
from gazette_sdk.fragment.stores.base import (
    ATTEMPTS,
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

_IN_MEMORY_BYTES: Final = 64 << 20
"""Greatest upload that is read into memory; larger ones are read while they are sent."""

_LIMITS: Final[dict[str, Any]] = {
    "connection_timeout": CONNECT_TIMEOUT_S,
    "read_timeout": READ_TIMEOUT_S,
    "retry_total": 0,  # ObjectStore retries, for all stores
}

_DELEGATION: Final = timedelta(hours=2)
"""Validity of a delegation key, which signs URLs; a new one is fetched after half of it."""

_REFUSALS: Final = frozenset(
    {"ContainerNotFound", "ContainerDisabled", "ContainerBeingDeleted", "AccountIsDisabled"}
)


class AzureStore(ObjectStore):
    """A container of an Azure storage account, with the account's key.

    The account is that of the URL, else of ``AZURE_ACCOUNT_NAME``; its key is
    ``AZURE_ACCOUNT_KEY``. A connection string in ``AZURE_STORAGE_CONNECTION_STRING`` holds both,
    and may name another address, such as that of an emulator.

    Raises:
        StoreError: account or key are missing or malformed.
    """

    remedy = (
        "check the network, and AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_KEY (or "
        "AZURE_STORAGE_CONNECTION_STRING)"
    )
    authorization_remedy = (
        "check that the container exists, and that the account's key may read, write, list and "
        "delete its blobs"
    )

    def __init__(self, parsed: StoreURL) -> None:
        super().__init__(parsed)
        self._container = parsed.container
        try:
            self._fs = AzureBlobFileSystem(
                use_listings_cache=False,
                skip_instance_cache=True,
                max_concurrency=1,
                **self._credentials(),
            )
        except (ValueError, AzureError) as error:
            raise StoreError(
                f"{self._parsed.public}: {describe(error)}; {self.remedy}", store=self.url
            ) from error
        self._service: BlobServiceClient = self._fs.service_client

    def close(self) -> None:
        """Close the connections."""
        sync(get_loop(), self._service.close, timeout=CONNECT_TIMEOUT_S)

    def _credentials(self) -> dict[str, Any]:
        if connection := os.environ.get("AZURE_STORAGE_CONNECTION_STRING"):
            return {"connection_string": connection}
        account = self._parsed.account or os.environ.get("AZURE_ACCOUNT_NAME")
        key = os.environ.get("AZURE_ACCOUNT_KEY")
        if not account or not key:
            raise ValueError("no storage account or no key of it is given")
        return {"account_name": account, "account_key": key}

    # ---------------------------------------------------------- operations

    def _sign_get(self, key: str, ttl_s: float) -> str:
        credential = self._service.credential
        return self._signed(key, ttl_s, account_key=credential.account_key)

    def _signed(
        self,
        key: str,
        ttl_s: float,
        *,
        account_key: str | None = None,
        user_delegation_key: UserDelegationKey | None = None,
    ) -> str:
        url: str = self._blob(key).url
        signature = generate_blob_sas(
            account_name=str(self._service.account_name),
            container_name=self._container,
            blob_name=key,
            account_key=account_key,
            user_delegation_key=user_delegation_key,
            permission=BlobSasPermissions(read=True),
            expiry=datetime.now(UTC) + timedelta(seconds=max(1, ttl_s)),
            protocol="https" if url.startswith("https:") else "https,http",  # of an emulator
        )
        return f"{url}?{signature}"

    async def _head(self, key: str) -> ObjectStatus | None:
        try:
            found = await self._blob(key).get_blob_properties(**_LIMITS)
        except ResourceNotFoundError as error:
            if self._is_refusal(error):
                raise
            return None
        settings = found.content_settings
        return ObjectStatus(
            found.size, settings.content_encoding or "", bytes(settings.content_md5 or b"")
        )

    async def _fetch(self, key: str, begin: int, end: int) -> bytes:
        stream = await self._blob(key).download_blob(
            offset=begin, length=end - begin, max_concurrency=1, decompress=False, **_LIMITS
        )
        data: bytes = await stream.readall()
        return data

    async def _page(self, prefix: str, token: str | None) -> tuple[list[StoredObject], str | None]:
        client = self._service.get_container_client(self._container)
        blobs = client.list_blobs(name_starts_with=prefix, results_per_page=5000, **_LIMITS)
        pages: Any = blobs.by_page(continuation_token=token)  # its declared type is too narrow
        found = await anext(pages)
        page = [
            StoredObject(blob.name, int(blob.last_modified.timestamp()), blob.size)
            async for blob in found
        ]
        return page, pages.continuation_token or None

    async def _delete(self, key: str) -> None:
        await self._blob(key).delete_blob(**_LIMITS)

    def _upload(
        self,
        key: str,
        content: BinaryIO,
        length: int,
        content_encoding: str,
        overwrite: bool,  # noqa: FBT001
    ) -> None:
        settings = ContentSettings(
            content_type="application/octet-stream", content_encoding=content_encoding or None
        )
        # Small uploads can be repeated when a connection breaks. Large ones are sent in blocks.
        data = read_exactly(content, length) if length <= _IN_MEMORY_BYTES else None

        async def send() -> None:
            await self._blob(key).upload_blob(
                content if data is None else io.BytesIO(data),
                length=length,
                overwrite=overwrite,
                content_settings=settings,
                max_concurrency=1,
                **_LIMITS,
            )

        try:
            self._call(send, limit_s=PUT_TIMEOUT_S, attempts=1 if data is None else ATTEMPTS)
        except ResourceExistsError as error:
            if overwrite or _code(error) != "BlobAlreadyExists":
                raise

    def _blob(self, key: str) -> BlobClient:
        return self._service.get_blob_client(self._container, key)

    # -------------------------------------------------------------- errors

    def _is_refusal(self, error: BaseException) -> bool:
        if not isinstance(error, HttpResponseError):
            return False
        return error.status_code == 403 or _code(error) in _REFUSALS

    def _is_missing(self, error: BaseException) -> bool:
        return isinstance(error, (FileNotFoundError, ResourceNotFoundError))

    def _is_transient(self, error: BaseException) -> bool:
        if isinstance(error, HttpResponseError):
            return error.status_code in {408, 429} or (error.status_code or 0) >= 500
        return isinstance(error, (ServiceRequestError, ServiceResponseError, IncompleteReadError))


def _code(error: HttpResponseError) -> str:
    """Return the service's code of an error, empty if there is none."""
    code = getattr(error, "error_code", None)
    return str(getattr(code, "value", code) or "")


class AzureADStore(AzureStore):
    """A container of an Azure storage account, for an application registered with a tenant.

    Tenant, account and container are in the URL; the application is ``AZURE_CLIENT_ID`` with
    ``AZURE_CLIENT_SECRET``. URLs are signed by a delegation key, which is fetched when needed.

    Raises:
        StoreError: the application is missing.
    """

    remedy = "check the network, the URL's tenant, AZURE_CLIENT_ID and AZURE_CLIENT_SECRET"
    authorization_remedy = (
        "check that account and container exist, and that the application has the roles Storage "
        "Blob Data Contributor and Storage Blob Delegator"
    )

    def __init__(self, parsed: StoreURL) -> None:
        super().__init__(parsed)
        self._delegation_lock = threading.Lock()
        self._delegation: UserDelegationKey | None = None
        self._renew_at = 0.0

    def _credentials(self) -> dict[str, Any]:
        client, secret = os.environ.get("AZURE_CLIENT_ID"), os.environ.get("AZURE_CLIENT_SECRET")
        if not client or not secret:
            raise ValueError("no client id or no client secret is given")
        return {
            "account_name": self._parsed.account,
            "tenant_id": self._parsed.tenant,
            "client_id": client,
            "client_secret": secret,
        }

    def close(self) -> None:
        """Close the connections."""
        super().close()
        sync(get_loop(), self._fs.credential.close, timeout=CONNECT_TIMEOUT_S)

    def _sign_get(self, key: str, ttl_s: float) -> str:
        return self._signed(key, ttl_s, user_delegation_key=self._delegation_key())

    def _delegation_key(self) -> UserDelegationKey:
        with self._delegation_lock:
            if self._delegation is None or time.monotonic() >= self._renew_at:
                now = datetime.now(UTC)

                async def fetch() -> UserDelegationKey:
                    return await self._service.get_user_delegation_key(
                        now - timedelta(minutes=5), now + _DELEGATION, **_LIMITS
                    )

                self._delegation = self._call(fetch)
                self._renew_at = time.monotonic() + _DELEGATION.total_seconds() / 2
            return self._delegation

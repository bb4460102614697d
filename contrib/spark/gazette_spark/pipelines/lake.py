"""Directories of Parquet files: ``LAKE/date=2026-01-31/hour=17/batch=42/*.parquet``.

``batch=A-B`` has what batches A to B had. Names that begin with an underscore are not data: readers
of Parquet pass over them. Files are reached as Spark reaches them, over Hadoop's file systems.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

_BATCH = re.compile(r"batch=(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True)
class BatchDirectory:
    """Directory of the rows of one hour that one or more batches wrote.

    Attributes:
        hour: path of its hour below the lake, ``date=…/hour=…``.
        first: number of the first batch.
        last: number of the last batch.
    """

    hour: str
    first: int
    last: int

    @property
    def path(self) -> str:
        """Path below the lake."""
        batches = f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"
        return f"{self.hour}/batch={batches}"

    @classmethod
    def parse(cls, path: str) -> BatchDirectory | None:
        """Return the directory of a path below the lake; ``None`` for another directory."""
        hour, _, name = path.rpartition("/")
        match = _BATCH.fullmatch(name)
        if match is None:
            return None
        first, last = match.groups()
        return cls(hour, int(first), int(last or first))


class Lake:
    """Directory of Parquet files, and the file system that has it.

    Args:
        spark: session whose Hadoop configuration has the credentials.
        url: URL of the directory, as for ``DataFrameReader.parquet``.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        self.url = url.rstrip("/")
        jvm: Any = spark._jvm  # noqa: SLF001 - PySpark has no other way to its file systems
        self._hadoop = jvm.org.apache.hadoop.fs
        root = self._hadoop.Path(self.url)
        self._files: Any = root.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())  # noqa: SLF001
        self._root = str(self._files.makeQualified(root).toString()).rstrip("/")

    def exists(self) -> bool:
        """Return True if the directory is there; in an object store, if anything is below it."""
        return bool(self._files.exists(self._hadoop.Path(self._root)))

    def batches(self) -> list[BatchDirectory]:
        """Return the directories of batches, by hour and number."""
        found = self._files.globStatus(self._path("date=*/hour=*/batch=*")) or ()
        prefix = len(self._root) + 1
        paths = (str(status.getPath().toString())[prefix:] for status in found)
        batches = [batch for path in paths if (batch := BatchDirectory.parse(path)) is not None]
        return sorted(batches, key=lambda batch: (batch.hour, batch.first, batch.last))

    def absolute(self, path: str) -> str:
        """Return the URL of a path below the lake."""
        return f"{self.url}/{path}"

    def size_bytes(self, path: str) -> int:
        """Return the size of the files below a path."""
        return int(self._files.getContentSummary(self._path(path)).getLength())

    def files(self, path: str = "") -> Iterator[tuple[str, int]]:
        """Yield URL and size in bytes of each file of data below a path."""
        listing = self._files.listFiles(
            self._path(path) if path else self._hadoop.Path(self.url), True
        )
        while listing.hasNext():
            status = listing.next()
            url = str(status.getPath().toString())
            names = url[len(self._root) + 1 :].split("/")
            if not any(name.startswith(("_", ".")) for name in names):
                yield url, int(status.getLen())

    def delete(self, path: str) -> None:
        """Delete a file, or a directory with all that is in it. It need not exist."""
        self._files.delete(self._path(path), True)

    def read_json(self, path: str) -> Any:
        """Return the JSON document of a file below the lake."""
        stream = self._files.open(self._path(path))
        try:
            return json.loads(bytes(stream.readAllBytes()))
        finally:
            stream.close()

    def write_json(self, path: str, document: Any) -> None:
        """Write a JSON document to a new file below the lake, which readers see when complete."""
        part = self._path(f"{path}.part")
        stream = self._files.create(part, True)
        try:
            stream.write(bytearray(json.dumps(document).encode()))
        finally:
            stream.close()
        self._files.rename(part, self._path(path))

    def names(self, pattern: str) -> list[str]:
        """Return the names of the files below the lake whose paths match a pattern."""
        found = self._files.globStatus(self._path(pattern)) or ()
        return sorted(str(status.getPath().getName()) for status in found)

    def _path(self, path: str) -> Any:
        return self._hadoop.Path(f"{self._root}/{path}")

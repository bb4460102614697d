"""Reasons of failed pipelines, out of what Spark says."""

from __future__ import annotations

import pytest
from pyspark.errors import PySparkException

from gazette_sdk.cli.spark.driver import reason_of
from gazette_sdk.errors import UnavailableError

STREAM = """[STREAM_FAILED] Query [id = 8223] terminated with exception: [PYTHON_ERROR] Failed: \
Traceback (most recent call last):
  File "stream.py", line 80, in prepareForTriggerAvailableNow
    raise self._exception
gazette_sdk.errors.UnavailableError: cannot connect to http://127.0.0.1:9; check it
 SQLSTATE: 38000 SQLSTATE: XXKST
=== Streaming Query ===
Identifier: [id = 8223, runId = 458c]
Current Available Offsets: {}

Current State: INITIALIZING
Thread State: RUNNABLE"""

COLUMN = """[UNRESOLVED_COLUMN] A column with name `text` cannot be resolved. SQLSTATE: 42703;
'Project ['explode('regexp_extract_all('lower('text), [a-z]+, 0)) AS word#23]
+- Range (0, 3, step=1, splits=Some(1))
"""

FILE = """An error occurred while calling o177.collectToPython.
: java.io.IOException: [FAILED_READ] Reading bad.json.  SQLSTATE: KD001
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.read(QueryExecutionErrors.scala:856)
Caused by: java.io.IOException: Torn.
\t... 1 more
Caused by: java.io.IOException: Torn.
\t... 24 more
"""

CALLBACK = """An exception was raised by the Python Proxy. Return Message: \
Traceback (most recent call last):
  File "export.py", line 80, in write
py4j.protocol.Py4JJavaError: An error occurred while calling o90.parquet.
: java.io.IOException: No space left on device
\tat java.base/java.lang.Thread.run(Thread.java:840)
"""


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            STREAM,
            "gazette_sdk.errors.UnavailableError: cannot connect to http://127.0.0.1:9; check it",
        ),
        (COLUMN, "[UNRESOLVED_COLUMN] A column with name `text` cannot be resolved."),
        (
            FILE,
            "java.io.IOException: [FAILED_READ] Reading bad.json.; java.io.IOException: Torn.",
        ),
        (CALLBACK, "java.io.IOException: No space left on device"),
        ("", "PySparkException('')"),
    ],
    ids=["stream", "plan", "Java", "callback", "nothing"],
)
def test_the_reason_is_the_line_that_names_the_cause(text: str, reason: str):
    assert reason_of(PySparkException(text)) == reason


def test_the_reason_of_an_error_of_the_package_is_its_text_in_one_line():
    assert reason_of(UnavailableError("no broker\n  there")) == "no broker; there"

"""Options of a write: what they mean, and which are refused."""

from __future__ import annotations

import pytest
from pyspark.sql import types as st

from gazette_sdk.errors import ConfigurationError
from gazette_spark.write_options import WriteOptions

SCHEMA = st.StructType(
    [
        st.StructField("n", st.LongType()),
        st.StructField("customer", st.StringType()),
        st.StructField("at", st.TimestampType()),
        st.StructField("_journal", st.StringType()),
        st.StructField("_offset", st.LongType()),
    ]
)
JOURNALS = {"journals": "topic=copies"}


def parse(options: dict[str, str], *, is_stream: bool = False) -> WriteOptions:
    return WriteOptions.parse(options, SCHEMA, is_stream=is_stream)


def test_what_is_left_out_has_a_default(monkeypatch):
    monkeypatch.setenv("GAZETTE_ADDRESS", "http://broker:8080")
    assert parse({"journals": "topic=copies", "path": ""}) == WriteOptions(
        url="http://broker:8080",
        journals="topic=copies",
        key="",
        message="",
        transaction_log="gazette-spark/transactions",
        app="",
        version=None,
        columns=("n", "customer", "at"),
    )


def test_names_of_options_have_no_case():
    options = {"Key": "n", "txnAppId": "app", "TXNVERSION": "7", "transactionLog": "logs/"}
    parsed = parse(JOURNALS | options)
    assert (parsed.key, parsed.app, parsed.version) == ("n", "app", 7)
    assert parsed.transaction_log == "logs"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"journals": ""}, "the option 'journals' is missing: a label selector"),
        ({"journals": "a b c"}, "journals 'a b c': "),
        ({"topic": "copies"}, "unknown option 'topic' of a write; known are address, journals"),
        ({"path": "/there"}, "the path '/there' selects no journals"),
        ({"store": "s3://bucket/"}, "only brokers write; give the 'address' of one"),
        ({"address": "file:///there/"}, "only brokers write; give the 'address' of one"),
        ({"journals": "prefix=gazette-spark/"}, "logs, as gazette-spark/transactions/batch; add"),
        ({"journals": "content-type=application/x-ndjson"}, "are also transaction logs"),
        ({"key": "city"}, "key 'city' is none of the columns that are written: n, customer, at"),
        ({"key": "_journal"}, "key '_journal' is none of the columns that are written"),
        ({"key": "at"}, "key 'at' has type timestamp; a key is a string, binary or an integer"),
        ({"txnAppId": "x"}, "give both of txnAppId and txnVersion, or neither"),
        ({"txnVersion": "1"}, "give both of txnAppId and txnVersion, or neither"),
        ({"txnAppId": "x", "txnVersion": "new"}, "txnVersion 'new' is no integer of at least 0"),
        ({"txnAppId": "x", "txnVersion": "-1"}, "txnVersion '-1' is no integer of at least 0"),
        ({"txnAppId": "batch", "txnVersion": "1"}, "txnAppId 'batch' is reserved"),
        (
            {"txnAppId": "a b", "txnVersion": "1"},
            "be named 'gazette-spark/transactions/a b'",
        ),
        ({"txnAppId": "a;b", "txnVersion": "1"}, "(it has a ';'); change txnAppId or"),
        ({"transactionLog": "/logs"}, "cannot be named '/logs/batch'"),
        ({"message": "no.module:Class"}, "message 'no.module:Class' cannot be loaded"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(options: dict[str, str], message: str):
    with pytest.raises(ConfigurationError) as caught:
        parse(JOURNALS | options)
    assert message in str(caught.value)
    assert str(caught.value).startswith("gazette: ")


def test_a_stream_is_known_by_its_query():
    parse(JOURNALS | {"checkpointLocation": "/there"}, is_stream=True)
    with pytest.raises(ConfigurationError, match="txnAppId and txnVersion are for batch writes"):
        parse(JOURNALS | {"txnAppId": "x", "txnVersion": "1"}, is_stream=True)


def test_a_selector_may_leave_transaction_logs_out():
    selector = "content-type=application/x-ndjson,app.gazette.dev/managed-by!=gazette-spark"
    assert parse({"journals": selector}).journals == selector


def test_columns_of_one_name_are_refused():
    schema = st.StructType([SCHEMA["n"], SCHEMA["n"]])
    with pytest.raises(ConfigurationError, match="columns have the same name, 'n'"):
        WriteOptions.parse(JOURNALS, schema, is_stream=False)


def test_intervals_of_months_are_refused_by_their_column():
    nested = st.StructType([st.StructField("span", st.YearMonthIntervalType())])
    schema = st.StructType([SCHEMA["n"], st.StructField("odd", st.ArrayType(nested))])
    with pytest.raises(ConfigurationError, match=r"column 'odd' has type array<.*cast it"):
        WriteOptions.parse(JOURNALS, schema, is_stream=False)


def test_metadata_columns_alone_are_nothing_to_write():
    schema = st.StructType([SCHEMA["_journal"], SCHEMA["_offset"]])
    with pytest.raises(ConfigurationError, match="there is no column to write"):
        WriteOptions.parse(JOURNALS, schema, is_stream=False)

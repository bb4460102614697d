"""Options of reads: what is wrong is one clear error."""

import pytest

from gazette_sdk.errors import ConfigurationError
from gazette_spark.options import DEFAULT_ADDRESS, Options

STORE = {"store": "file:///", "journals": "a/"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"journals": "a", "maxBytesPerTriger": "1m"},
            "option 'maxbytespertriger'; .*maxBytesPerTrigger",
        ),
        ({"journals": "a", "path": "/there"}, "the path '/there' selects no journals"),
        ({"journals": "a", "address": "http://a", "store": "file:///"}, "not both"),
        ({"journals": "a", "address": "s3://bucket/"}, "'s3://bucket/' is no broker.* 'store'"),
        ({"journals": "a", "address": "localhost:8080"}, "begins with http://"),
        ({"journals": "a", "address": "embedded:///tmp"}, "begins with http://"),
        ({"journals": "a/", "store": "https://broker:8080"}, "is a broker; give it as 'address'"),
        ({"address": "http://a"}, "'journals' is missing: a label selector"),
        ({"store": "file:///"}, "'journals' is missing: a journal's name or a prefix"),
        ({**STORE, "begin": "2026-01-02", "end": "2026-01-01"}, "is behind end"),
        ({**STORE, "begin": '{"a/b": 9}', "end": '{"a/b": 8}'}, "begin 9 of a/b is behind end 8"),
        ({**STORE, "begin": '{"a/b": "9"}'}, "begin of a/b must be an offset"),
        ({**STORE, "begin": "4096"}, "neither a JSON object of offsets by journal nor a time"),
        ({**STORE, "isolation": "serializable"}, "is not one of committed, uncommitted"),
        ({**STORE, "mode": "strict"}, "is not one of FAILFAST, PERMISSIVE, DROPMALFORMED"),
        ({**STORE, "maxBytesPerTrigger": "0"}, "is no size"),
        ({**STORE, "failOnDataLoss": "no"}, "is not one of true, false"),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other_are_refused(
    given: dict[str, str], message: str
):
    with pytest.raises(ConfigurationError, match=message):
        Options.parse(given)


def test_without_an_address_that_of_the_environment_or_a_local_one_is_used(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("GAZETTE_ADDRESS", "http://broker:80")
    assert Options.parse({"journals": "a"}).url == "http://broker:80"
    monkeypatch.setenv("GAZETTE_ADDRESS", "")
    assert Options.parse({"journals": "a"}).url == DEFAULT_ADDRESS


def test_an_empty_range_is_none_that_begins_behind_its_end():
    day = "2026-01-01"
    assert Options.parse({**STORE, "begin": day, "end": day}).begin.time is not None
    at = '{"a/b": 9}'
    assert Options.parse({**STORE, "begin": at, "end": at}).end.offsets == {"a/b": 9}

"""Names of partitions."""

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.journals.changes import default_replication, partition_names, warn_without_spare
from support.brokers import journal_spec


@pytest.mark.parametrize("partitions", [0, 1])
def test_a_name_that_no_journal_can_have_is_refused(partitions: int):
    with pytest.raises(ValidationError, match=r"^Name: .*\('bad name"):
        partition_names("bad name", partitions)


def test_a_number_of_partitions_that_is_none_is_refused():
    with pytest.raises(ValidationError, match="a: partitions='3' is no whole number"):
        partition_names("a", "3")


def test_a_topic_may_be_shorter_than_the_name_of_a_journal():
    assert partition_names("a", 2) == ["a/part-000", "a/part-001"]


@pytest.mark.parametrize(
    ("brokers", "replication"), [(1, 1), (2, 1), (3, 2), (4, 3), (5, 3), (100, 3)]
)
def test_the_default_replication_spares_a_broker(brokers: int, replication: int):
    assert default_replication(brokers) == replication


@pytest.mark.parametrize(
    ("replication", "brokers", "text"),
    [
        (1, 1, ""),
        (2, 3, ""),
        (3, 0, ""),  # the cluster does not say
        (3, 3, "while one of these is away, their appends wait for it"),
        (3, 2, "their appends are refused"),
    ],
)
def test_replication_without_a_broker_to_spare_is_warned_of(
    replication: int, brokers: int, text: str, caplog: pytest.LogCaptureFixture
):
    specs = [journal_spec("a/single"), journal_spec("a/journal", replication=replication)]
    warn_without_spare(specs, brokers)
    assert ("replication of a/journal leaves no broker to spare" in caplog.text) == bool(text)
    assert text in caplog.text

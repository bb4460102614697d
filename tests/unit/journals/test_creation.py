"""Names of partitions."""

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.journals.creation import partition_names


@pytest.mark.parametrize("partitions", [0, 1])
def test_a_name_that_no_journal_can_have_is_refused(partitions: int):
    with pytest.raises(ValidationError, match=r"^Name: .*\('bad name"):
        partition_names("bad name", partitions)


def test_a_topic_may_be_shorter_than_the_name_of_a_journal():
    assert partition_names("a", 2) == ["a/part-000", "a/part-001"]

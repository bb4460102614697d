from __future__ import annotations

import pytest

from gazette_sdk.cli.journals.fragments import stored_of
from gazette_sdk.protocol import broker_pb2 as pb
from support.etcd import run


class Broker:
    """A broker with a fragment, and a torn one; others know no requests for torn ones."""

    def __init__(self, *, is_ours):
        self.is_ours = is_ours

    async def list_fragments(self, request, target):
        torn = request.torn_only and self.is_ours
        response = pb.FragmentsResponse(status=pb.OK)
        response.fragments.add(
            spec=pb.Fragment(
                journal=request.journal, begin=0 if torn else 15, end=15 + 5 * (not torn)
            )
        )
        return response


@pytest.mark.parametrize(("is_ours", "begins"), [(True, [15, 0]), (False, [15])])
def test_what_is_pruned_has_the_torn_objects_that_a_broker_knows_and_nothing_twice(is_ours, begins):
    journal = pb.ListResponse.Journal(spec=pb.JournalSpec(name="a/journal"))
    response = run(stored_of(Broker(is_ours=is_ours), journal))
    assert [each.spec.begin for each in response.fragments] == begins

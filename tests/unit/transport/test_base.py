from __future__ import annotations

import re

import pytest

from gazette_sdk import Journals, Publisher, Reader, connect
from gazette_sdk.errors import ConfigurationError
from gazette_sdk.shard import EmbeddedConsumer
from support.order_totals import totals

ADDRESS = "http://localhost:8080"


@pytest.mark.parametrize(
    "make",
    [
        Journals,
        lambda transport: Publisher(transport=transport),
        lambda transport: Reader(dict, "topic=orders", transport=transport),
        lambda transport: EmbeddedConsumer(totals, transport=transport),
    ],
    ids=["journals", "publisher", "reader", "consumer"],
)
@pytest.mark.parametrize(
    ("given", "remedy"),
    [(ADDRESS, f"transport=connect('{ADDRESS}')"), (connect, "transport=what connect() made")],
    ids=["address", "function"],
)
def test_what_is_no_transport_is_refused_at_once(make, given, remedy):
    with pytest.raises(ConfigurationError, match=re.escape(remedy)):
        make(given)

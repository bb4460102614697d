"""Names of brokers over a data directory."""

from gazette_sdk.local_cluster.cluster import broker_name


def test_a_broker_has_its_number_in_its_name(tmp_path):
    assert [broker_name(tmp_path, index) for index in (0, 1, 12)] == [
        "broker-0",
        "broker-1",
        "broker-12",
    ]


def test_a_broker_whose_spools_have_an_earlier_name_keeps_it(tmp_path):
    (tmp_path / "broker-001").mkdir()
    assert [broker_name(tmp_path, index) for index in (0, 1)] == ["broker-0", "broker-001"]

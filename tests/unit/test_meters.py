from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from gazette_sdk.meters import Buckets, PlainHistogram, PlainMetric, ReadMetric, Tally


def test_a_plain_counter_counts():
    registry = CollectorRegistry()
    counter = PlainMetric("things_totals", "Things.", ("kind",), registry)
    counter.inc("a")
    counter.inc("a", by=2)
    assert (counter.value("a"), counter.value("b")) == (3, 0)
    assert registry.get_sample_value("things_totals", {"kind": "a"}) == 3


def test_a_cell_is_the_number_of_its_labels():
    registry = CollectorRegistry()
    counter = PlainMetric("things_totals", "Things.", ("kind",), registry)
    cell = counter.cell("a")
    cell.value += 2
    counter.inc("a")
    assert counter.cell("a") is cell
    assert registry.get_sample_value("things_totals", {"kind": "a"}) == 3


def test_a_gauge_is_exposed_until_it_is_removed():
    registry = CollectorRegistry()
    gauge = PlainMetric("head", "Head.", ("journal",), registry, kind="gauge")
    gauge.cell("a").value = 7
    assert b"# TYPE head gauge" in generate_latest(registry)
    assert registry.get_sample_value("head", {"journal": "a"}) == 7
    gauge.remove("a")
    gauge.remove("a")
    assert registry.get_sample_value("head", {"journal": "a"}) is None


def test_a_tally_is_exposed_as_a_counter():
    registry = CollectorRegistry()
    tally = Tally("things", "Things.", registry)
    tally.value += 5
    assert registry.get_sample_value("things_total") == 5
    assert b"# TYPE things_total counter" in generate_latest(registry)


def test_a_counter_with_labels_has_its_type():
    registry = CollectorRegistry()
    PlainMetric("things_total", "Things.", ("kind",), registry, kind="counter").inc("a")
    assert registry.get_sample_value("things_total", {"kind": "a"}) == 1
    assert b"# TYPE things_total counter" in generate_latest(registry)


def test_a_hidden_metric_shows_no_number():
    registry = CollectorRegistry()
    metric = PlainMetric("head", "Head.", ("journal",), registry, kind="gauge")
    metric.inc("a")
    metric.is_hidden = True
    assert registry.get_sample_value("head", {"journal": "a"}) is None


def test_a_histogram_counts_values_up_to_each_bound():
    registry = CollectorRegistry()
    histogram = PlainHistogram("spent", "Time.", "stage", bounds=(0.1, 1.0), registry=registry)
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.buckets("wait").observe(value)
    found = {
        bound: registry.get_sample_value("spent_bucket", {"stage": "wait", "le": bound})
        for bound in ("0.1", "1.0", "+Inf")
    }
    assert found == {"0.1": 2, "1.0": 3, "+Inf": 4}
    assert registry.get_sample_value("spent_sum", {"stage": "wait"}) == 7.65


def test_a_histogram_without_label_is_one_series():
    registry = CollectorRegistry()
    PlainHistogram("spent", "Time.", registry=registry).buckets().observe(0.02)
    assert registry.get_sample_value("spent_count") == 1


def test_a_histogram_includes_what_is_counted_elsewhere():
    registry = CollectorRegistry()
    histogram = PlainHistogram("spent", "Time.", "stage", bounds=(1.0,), registry=registry)
    elsewhere = Buckets((1.0,))
    histogram.include("total", elsewhere)
    histogram.buckets("total").observe(0.5)
    elsewhere.observe(2.0)
    assert registry.get_sample_value("spent_count", {"stage": "total"}) == 2
    assert registry.get_sample_value("spent_bucket", {"stage": "total", "le": "1.0"}) == 1


def test_buckets_of_several_are_added():
    first, second = Buckets((1.0,)), Buckets((1.0,))
    first.observe(0.5)
    second.observe(2.0)
    first.add(second)
    assert first.exposed() == ([("1.0", 1), ("+Inf", 2)], 2.5)


def test_numbers_are_read_at_a_scrape_until_their_server_ends():
    registry = CollectorRegistry()
    metric = ReadMetric("free", "Free.", ("disk",), combine=min, registry=registry)
    value = 3.0
    remove = metric.add(lambda: {("a",): value})
    remove_other = metric.add(lambda: {("a",): 2.0, ("b",): 9.0})
    assert registry.get_sample_value("free", {"disk": "a"}) == 2
    remove_other()
    value = 4.0
    assert registry.get_sample_value("free", {"disk": "a"}) == 4
    assert registry.get_sample_value("free", {"disk": "b"}) is None
    remove()
    remove()
    assert registry.get_sample_value("free", {"disk": "a"}) is None

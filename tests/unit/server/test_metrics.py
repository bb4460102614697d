import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from gazette_sdk.meters import PlainMetric
from gazette_sdk.server.metrics import (
    SLICE_LINES,
    _code_label,
    meters_of,
    metrics_text,
    sliced_metrics_text,
)
from gazette_sdk.transport.loop import run


def test_names_are_exactly_those_of_dashboards():
    registry = CollectorRegistry()
    Counter(
        "gazette_journal_server_started_totals", "Begun.", ["operation"], registry=registry
    ).labels("Read").inc()
    Counter("gazette_sequencer_queued", "Queued.", registry=registry).inc(2)
    Counter("gazette_spool_commits_total", "Commits.", registry=registry).inc(3)
    Gauge("gazette_write_head", "Next offset.", ["journal"], registry=registry).labels('a/"b"').set(
        7
    )
    assert metrics_text(registry).splitlines() == [
        "# HELP gazette_journal_server_started_totals Begun.",
        "# TYPE gazette_journal_server_started_totals counter",
        'gazette_journal_server_started_totals{operation="Read"} 1.0',
        "# HELP gazette_sequencer_queued Queued.",
        "# TYPE gazette_sequencer_queued counter",
        "gazette_sequencer_queued 2.0",
        "# HELP gazette_spool_commits_total Commits.",
        "# TYPE gazette_spool_commits_total counter",
        "gazette_spool_commits_total 3.0",
        "# HELP gazette_write_head Next offset.",
        "# TYPE gazette_write_head gauge",
        'gazette_write_head{journal="a/\\"b\\""} 7.0',
    ]


def test_buckets_are_written_as_others_write_them():
    registry = CollectorRegistry()
    Histogram("h", "Help\nin two lines.", buckets=(0.5, 1, 10), registry=registry).observe(2)
    lines = metrics_text(registry).splitlines()
    assert "# HELP h Help\\nin two lines." in lines
    assert [line for line in lines if "bucket" in line] == [
        'h_bucket{le="0.5"} 0.0',
        'h_bucket{le="1"} 0.0',
        'h_bucket{le="10"} 1.0',
        'h_bucket{le="+Inf"} 1.0',
    ]
    assert "h_count 1.0" in lines
    assert not any("created" in line for line in lines)


def test_a_text_of_many_series_is_made_in_slices_and_is_the_same():
    registry = CollectorRegistry()
    metric = PlainMetric("head", "Head.", ("journal",), registry, kind="gauge")
    for number in range(3 * SLICE_LINES):
        metric.cell(f"a/{number}").value = number
    turns = []

    async def scenario():
        making = asyncio.ensure_future(sliced_metrics_text(registry))
        while not making.done():
            await asyncio.sleep(0)
            turns.append(1)
        return making.result()

    assert run(scenario(), 20) == metrics_text(registry)
    assert len(turns) >= 3


def test_infos_are_gauges():
    registry = CollectorRegistry()
    Info("build", "Build.", registry=registry).info({"version": "1"})
    assert metrics_text(registry).splitlines() == [
        "# HELP build_info Build.",
        "# TYPE build_info gauge",
        'build_info{version="1"} 1.0',
    ]


def test_codes_are_spelled_as_grpc_labels_spell_them():
    assert [_code_label(code) for code in ("OK", "CANCELLED", "UNKNOWN", "DEADLINE_EXCEEDED")] == [
        "OK",
        "Canceled",
        "Unknown",
        "DeadlineExceeded",
    ]


def test_calls_of_a_method_are_counted_on_every_wire_alike():
    meters = meters_of("/package.Service/Counted", True, False)
    assert meters_of("/package.Service/Counted", True, False) is meters
    meters.started += 3
    meters.received += 7
    meters.sent += 2
    for code, duration_s in (("OK", 0.0001), ("OK", 0.005), ("DEADLINE_EXCEEDED", 0.3)):
        meters.handled(code, duration_s)
    meters.handled("OK", 11.0)
    labels = 'grpc_type="client_stream",grpc_service="package.Service",grpc_method="Counted"'
    lines = [line for line in metrics_text().splitlines() if labels in line]
    assert lines == [
        f"grpc_server_started_total{{{labels}}} 3.0",
        f"grpc_server_msg_received_total{{{labels}}} 7.0",
        f"grpc_server_msg_sent_total{{{labels}}} 2.0",
        f'grpc_server_handled_total{{{labels},grpc_code="OK"}} 3.0',
        f'grpc_server_handled_total{{{labels},grpc_code="DeadlineExceeded"}} 1.0',
        *(
            f'grpc_server_handling_seconds_bucket{{{labels},le="{bound}"}} {count}.0'
            for bound, count in (
                ("0.005", 2), ("0.01", 2), ("0.025", 2), ("0.05", 2), ("0.1", 2), ("0.25", 2),
                ("0.5", 3), ("1", 3), ("2.5", 3), ("5", 3), ("10", 3), ("+Inf", 4),
            )
        ),
        f"grpc_server_handling_seconds_count{{{labels}}} 4.0",
        f"grpc_server_handling_seconds_sum{{{labels}}} 11.3051",
    ]  # fmt: skip

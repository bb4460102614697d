"""Reports for people."""

from gazette_sdk.cli.cluster import report_lines
from gazette_sdk.protocol import cluster_pb2 as clpb

Application = clpb.ReportResponse.Application


def test_a_report_fits_a_screen():
    report = clpb.ReportResponse(
        cluster="/gazette/cluster",
        clock_us=1_700_000_000_000_000,
        brokers=3,
        zones=["a", "b", "c"],
        journals=812,
        replicas=2400,
        states={"JOURNAL_OK": 809, "JOURNAL_SHORT": 2, "JOURNAL_SINGLE_ZONE": 1},
        unstored=1 << 30,
        oldest_unstored_s=250.4,
        append_rate=41e6,
        read_rate=180e6,
        stores=[clpb.ReportResponse.Store(url="s3://b/")],
        applications=[
            Application(name="totals", processes=2, shards=4, failed=1, recovering=2, lag_s=3),
            Application(name="rides", processes=1, error="no answer within 2 s"),
        ],
        problems=[
            clpb.Problem(
                severity=clpb.ERROR,
                check="shards-failed",
                text="totals/3 of totals has failed: KeyError.",
                command="gazctl shards list --errors",
            ),
            clpb.Problem(
                severity=clpb.WARNING,
                check="journals-short",
                others=1,
                text="orders/part-017 has fewer replicas than its spec asks for.",
                command="gazette allocator simulate",
            ),
        ],
    )
    assert list(report_lines(report)) == [
        "/gazette/cluster at 2023-11-14 22:13:20 UTC",
        (
            "3 brokers in 3 zones, 812 journals with 2400 replicas, 1 store, 2 applications with 4 "
            "shards"
        ),
        "append 39 MiB/s, read 172 MiB/s, in no store 1.0 GiB (oldest 4m10s)",
        "journals: 809 ok, 2 short, 1 single zone",
        "totals: 2 processes, 4 shards, 1 failed, 2 recovering, lag 3s",
        "rides: 1 process, not known",
        "",
        "ERROR  shards-failed: totals/3 of totals has failed: KeyError.",
        "    $ gazctl shards list --errors",
        (
            "WARNING  journals-short: orders/part-017 has fewer replicas than its spec asks for. "
            "(1 more)"
        ),
        "    $ gazette allocator simulate",
    ]


def test_what_is_not_permitted_is_shown_as_not_known():
    lines = list(report_lines(clpb.ReportResponse(cluster="/gazette/cluster", brokers=1)))
    assert lines[2] == "append -, read -, in no store -"
    assert lines[-1] == "nothing needs attention"

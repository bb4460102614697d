"""Output formats."""

from __future__ import annotations

import hashlib
import io
import json

import pytest
from google.protobuf import json_format, text_format

from gazette_sdk.cli.formats import (
    age,
    fragment_json,
    iec_bytes,
    message_json,
    proto_text,
    write_table,
)
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import from_seconds
from gazette_sdk.protocol.fragments import sum_of


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1100, "1.1 KiB"),
        (10 * 1024, "10 KiB"),
        (1024 * 1024 - 1, "1.0 MiB"),
        (5 << 40, "5.0 TiB"),
        (3000 << 50, "3000 PiB"),
    ],
)
def test_lengths_are_in_binary_units(count, text):
    assert iec_bytes(count) == text


@pytest.mark.parametrize(
    ("elapsed_s", "text"),
    [
        (-5, "now"),
        (0.5, "now"),
        (1, "1 second ago"),
        (59, "59 seconds ago"),
        (60, "1 minute ago"),
        (7200, "2 hours ago"),
        (86400 * 6, "6 days ago"),
        (86400 * 20, "2 weeks ago"),
        (86400 * 90, "3 months ago"),
        (86400 * 365 * 3 + 5, "3 years ago"),
    ],
)
def test_ages_are_in_words(elapsed_s, text):
    assert age(1_700_000_000, 1_700_000_000 + elapsed_s) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("label", ["[red]", "x" * 500])
def test_tables_have_borders_on_a_terminal_and_show_cells_as_they_are(label):
    out = Terminal()
    write_table(["Name", "a-label"], [["x" * 500, label], ["y", ""]], out)
    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0].startswith("┌")
    assert "NAME" in lines[1]
    assert "A-LABEL" in lines[1]
    assert "x" * 500 in lines[3]
    assert label in lines[3]


def test_tables_are_plain_columns_elsewhere():
    out = io.StringIO()
    rows = [["x" * 500, "[red]", "5"], ["y", "", "12"], ["a longer name", "b", ""]]
    write_table(["Name", "a-label", "Head"], rows, out)
    assert out.getvalue().splitlines() == [
        f"NAME{' ' * 498}A-LABEL  HEAD",
        f"{'x' * 500}  [red]    5",
        f"y{' ' * 501}         12",
        f"a longer name{' ' * 489}b",
    ]


def test_a_table_without_rows_is_its_header():
    out = io.StringIO()
    write_table(["Name"], [], out)
    assert out.getvalue() == "NAME\n"


def listing() -> pb.ListResponse:
    return pb.ListResponse(
        journals=[
            pb.ListResponse.Journal(
                spec=pb.JournalSpec(
                    name="a/b",
                    replication=1,
                    fragment=pb.JournalSpec.Fragment(
                        compression_codec=pb.GZIP, refresh_interval=from_seconds(0.02)
                    ),
                ),
                mod_revision=1 << 60,
            )
        ]
    )


def test_json_is_the_mapping_with_original_names_and_all_fields():
    message = listing()
    found = json.loads(message_json(message))
    journal = found["journals"][0]
    assert found["status"] == "OK"
    assert found["header"] is None
    assert journal["mod_revision"] == str(1 << 60)
    assert journal["spec"]["suspend"] is None
    assert journal["spec"]["fragment"]["refresh_interval"] == "0.020s"
    assert journal["spec"]["fragment"]["compression_codec"] == "GZIP"
    assert journal["spec"]["fragment"]["stores"] == []
    assert json_format.ParseDict(found, pb.ListResponse()) == message


def test_protobuf_text_parses_back():
    assert text_format.Parse(proto_text(listing()), pb.ListResponse()) == listing()


def test_fragments_are_json_of_plain_numbers_without_zeros():
    fragment = pb.FragmentsResponse._Fragment(
        spec=pb.Fragment(
            journal="a/b",
            begin=0,
            end=1 << 60,
            sum=pb.SHA1Sum(part1=(1 << 64) - 1),
            compression_codec=pb.SNAPPY,
        )
    )
    assert json.loads(fragment_json(fragment)) == {
        "spec": {
            "journal": "a/b",
            "end": 1 << 60,
            "sum": {"part1": (1 << 64) - 1},
            "compression_codec": 4,
        },
        "sha1": "ffffffffffffffff" + 24 * "0",
    }


def test_sums_that_json_readers_would_round_are_in_hexadecimal_too():
    digest = hashlib.sha1(b"content").digest()
    fragment = pb.FragmentsResponse._Fragment(spec=pb.Fragment(journal="a", sum=sum_of(digest)))
    assert json.loads(fragment_json(fragment))["sha1"] == digest.hex()
    fragment.spec.ClearField("sum")
    assert "sha1" not in json.loads(fragment_json(fragment))

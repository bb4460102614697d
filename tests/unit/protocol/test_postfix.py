from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from gazette_sdk.errors import ValidationError
from gazette_sdk.protocol import broker_pb2 as pb
from gazette_sdk.protocol.durations import format_time
from gazette_sdk.protocol.fragments import PostfixTemplate
from gazette_sdk.protocol.labels import label_set
from support.vectors import golden

TIME = datetime(2026, 3, 5, 7, 8, 9, 120_000, tzinfo=UTC)  # a Thursday
FRAGMENT = pb.Fragment(
    journal="a/journal", begin=5, end=25, compression_codec=pb.CompressionCodec.GZIP, mod_time=7
)
SPEC = pb.JournalSpec(
    name="a/journal", replication=3, labels=label_set([("kind", "blue"), ("kind", "red")])
)
REGISTERS = label_set([("epoch", "17")])


def evaluate(text, time=TIME):
    return PostfixTemplate(text).evaluate(FRAGMENT, SPEC, time, REGISTERS)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ""),
        ("a=1/b=2", "a=1/b=2"),
        (
            (
                'date={{ .Spool.FirstAppendTime.Format "2006-01-02" }}'
                '/hour={{ .Spool.FirstAppendTime.Format "15" }}'
            ),
            "date=2026-03-05/hour=07",
        ),
        ("{{ .Spool.Begin }}-{{.Spool.End}}", "5-25"),
        ("{{ .JournalSpec.Name }}/{{ .Spool.Journal }}", "a/journal/a/journal"),
        ('k={{ .JournalSpec.LabelSet.ValueOf "kind" }}', "k=blue"),
        ("k={{ .JournalSpec.LabelSet.ValueOf `kind` }}", "k=blue"),
        ('e={{ .Spool.Registers.ValueOf "epoch" }}', "e=17"),
        ('{{ .Registers.ValueOf "epoch" }}/{{ .Begin }}/{{ .Name }}', "17/5/a/journal"),
        ('{{ .LabelSet.ValueOf "kind" }}/{{ .FirstAppendTime.Format "2006" }}', "blue/2026"),
        ("{{ .Spool.CompressionCodec }}/{{ .Spool.ModTime }}", "GZIP/7"),
        ("{{ .JournalSpec.Replication }}", "3"),
        ("{{ .FirstAppendTime.Year }}/{{ .FirstAppendTime.Month }}", "2026/March"),
        ("{{ .FirstAppendTime.Unix }}/{{ .FirstAppendTime.YearDay }}", "1772694489/64"),
        ("a  {{- .Begin -}}  b", "a5b"),
        ("a{{/* nothing */}}b", "ab"),
        ('{{ .LabelSet.ValueOf "k\\u0069nd" }}', "blue"),
        ('{{ .LabelSet.ValueOf "missing" }}/x//y/', "x/y"),
    ],
)
def test_templates_are_evaluated(template, expected):
    assert evaluate(template) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ bad template",
        "{{ .Foo }}",
        "{{ .Spool }}",
        "{{ .Spool.Fragment }}",
        "{{ if .Begin }}x{{ end }}",
        '{{ printf "%d" .Begin }}',
        "{{ .Begin | print }}",
        "{{ .Spool.FirstAppendTime.Format }}",
        '{{ .Spool.FirstAppendTime.Truncate "1h" }}',
        "{{ .Spool.FirstAppendTime.Format 2006 }}",
        '{{ .LabelSet.ValueOf "a\\q" }}',
        '{{ .LabelSet.ValueOf "a\\xff" }}',
        "{{}}",
        "{{ .Begin",
    ],
)
def test_what_is_outside_of_the_subset_is_refused(template):
    with pytest.raises(ValidationError) as caught:
        PostfixTemplate(template)
    assert caught.value.kind == "invalid_template"


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("a b", "invalid_token"),
        ('{{ .FirstAppendTime.Format "15:04" }}', "invalid_token"),
        ("../{{ .Begin }}", "traverses_outside"),
        ("x{{/* */}}/{{- .Spool.BackingStore -}}../y", "traverses_outside"),
        ("x" * 513, "invalid_length"),
    ],
)
def test_a_result_which_listings_would_not_find_is_an_error(template, kind):
    with pytest.raises(ValidationError) as caught:
        evaluate(template)
    assert (caught.value.kind, caught.value.path) == (kind, "PathPostfix")


def test_times_are_utc():
    east = TIME.astimezone(timezone(timedelta(hours=9)))
    assert evaluate('{{ .FirstAppendTime.Format "15" }}', east) == "07"
    assert evaluate('{{ .FirstAppendTime.Format "15" }}', TIME.replace(tzinfo=None)) == "07"


def test_a_recorded_fragment_was_named_by_its_template():
    recorded = golden("broker/fragment_files.json")
    texts = [text for text in strings_of(recorded) if text.startswith("kind=")]
    template = next(text for text in texts if "{{" in text)
    spec = pb.JournalSpec(labels=label_set(kind="blue"))
    time = datetime(2026, 11, 21, tzinfo=UTC)
    made = {
        PostfixTemplate(template).evaluate(pb.Fragment(begin=begin), spec, time, pb.LabelSet())
        for begin in (0, 6)
    }
    assert made <= set(texts)


def strings_of(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings_of(item)


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("2006-01-02T15:04:05Z07:00", "2026-03-05T07:08:09Z"),
        ("2006-01-02 15:04:05 -0700 MST", "2026-03-05 07:08:09 +0000 UTC"),
        ("Mon Jan _2 15:04:05 2006", "Thu Mar  5 07:08:09 2026"),
        ("Monday, 02-Jan-06", "Thursday, 05-Mar-26"),
        ("January 2 3:4:5 PM", "March 5 7:8:9 AM"),
        ("03:04:05.000 pm", "07:08:09.120 am"),
        ("05.999999999", "09.12"),
        ("05,000000", "09,120000"),
        ("05.0005", "09.0009"),  # a digit follows: no fraction
        ("002 __2", "064  64"),
        ("1/2/06", "3/5/26"),
        ("-07:00:00 -070000 -07 Z0700", "+00:00:00 +000000 +00 Z"),
        ("_2006", "_2026"),
        ("Janus Month", "Janus Month"),
        ("date/hour", "date/hour"),
        ("20060102", "20260305"),
        ("2006/01/02/15", "2026/03/05/07"),
    ],
)
def test_layouts_are_those_of_go(layout, expected):
    assert format_time(TIME, layout) == expected


def test_afternoon_and_midnight_hours():
    assert format_time(TIME.replace(hour=0), "3PM 03") == "12AM 12"
    assert format_time(TIME.replace(hour=15), "3PM 03") == "3PM 03"
    assert format_time(TIME.replace(microsecond=0), "05.999|05.000") == "09|09.000"

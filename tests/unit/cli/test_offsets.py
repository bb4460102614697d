"""Files of offsets."""

from __future__ import annotations

import pytest

from gazette_sdk.cli.journals.list import load_offsets, store_offsets
from gazette_sdk.errors import ConfigurationError


def test_offsets_are_stored_as_a_whole_and_loaded_again(tmp_path):
    path = tmp_path / "offsets.json"
    store_offsets(path, {"b": 2, "a": 1 << 40})
    assert path.read_text() == '{"a":1099511627776,"b":2}\n'
    assert load_offsets(path, replaced=False) == {"a": 1 << 40, "b": 2}
    assert [each.name for each in tmp_path.iterdir()] == ["offsets.json"]


def test_a_file_that_will_be_replaced_is_moved_out_of_the_way(tmp_path):
    path = tmp_path / "offsets.json"
    path.write_text("{}")
    assert load_offsets(path, replaced=True) == {}
    assert [each.name for each in tmp_path.iterdir()] == ["offsets.json.previous"]


@pytest.mark.parametrize(
    "text", ["", "[]", "3", '{"a": "1"}', '{"a": true}', '{"a": -2}', '{"a": 1.5}', "{"]
)
def test_what_is_no_object_of_offsets_is_told_of_and_left_alone(tmp_path, text):
    path = tmp_path / "offsets.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"offsets\.json"):
        load_offsets(path, replaced=True)
    assert path.read_text() == text


def test_a_missing_file_is_told_of_with_the_remedy(tmp_path):
    with pytest.raises(ConfigurationError, match=r"absent\.json.*write \{\} to it"):
        load_offsets(tmp_path / "absent.json", replaced=False)

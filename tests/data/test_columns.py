"""Compact sequences equal tuples, and their JSON the one of the standard library."""

import io
import json
from array import array

import numpy as np
import pytest

from ngsgd.data import columns
from ngsgd.data.columns import Index, Selected, Spool, Strings, WordLists

NAMES = ("b", "", "straße", "語", "\ud800", "b2")
TEXTS = (("one", "two"), (), ("two",), ("two", "one", "two"), ("",))
LISTS = {"utt_ids": NAMES, "texts": TEXTS, "empty": ()}


@pytest.mark.parametrize(("found", "expected"), [
    (Strings(NAMES), NAMES), (WordLists(TEXTS), TEXTS), (Selected(NAMES, [3, 0, 0]), ("語", "b", "b")),
    (Spool([b"a", b"", b"bc"], bytes.decode), ("a", "", "bc"))])
def test_a_column_behaves_as_a_tuple(found: columns.Column[object], expected: tuple[object, ...]) -> None:
    assert found == expected
    assert expected == found
    assert found != expected[:-1]
    assert tuple(found) == expected
    assert found[-1] == expected[-1]
    assert found[::-2] == expected[::-2]
    with pytest.raises(IndexError):
        found[len(expected)]


def test_all_items_selected_are_the_sequence_itself() -> None:
    assert columns.selected(NAMES, range(len(NAMES))) is NAMES
    assert columns.selected(NAMES, [1]) == ("",)


def test_lists_are_written_as_json_dumps_writes_them() -> None:
    file = io.StringIO()
    columns.write_json(file, {"utt_ids": Strings(NAMES), "texts": WordLists(TEXTS), "empty": ()})
    assert file.getvalue() == json.dumps(LISTS)


@pytest.mark.parametrize("indent", [None, 2])
def test_lists_are_read_item_by_item(indent: int | None) -> None:
    found = {name: list(items) for name, items in columns.read_json(json.dumps(LISTS, indent=indent))}
    assert found == json.loads(json.dumps(LISTS))
    # lists that nobody reads
    assert [name for name, _ in columns.read_json(json.dumps(LISTS))] == list(LISTS)


@pytest.mark.parametrize("text", ["", "[]", '{"a": 1}', '{"a": [1}', '{"a": [1]', '{"a": [1 2]}', '{"a": [1]} x'])
def test_other_json_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        [list(items) for _, items in columns.read_json(text)]


def test_keys_are_found_in_any_order() -> None:
    keys = [f"utt{number}" for number in np.random.default_rng(0).permutation(500)]
    index = Index(array("q", map(hash, keys)), keys.__getitem__)
    assert [index.find(key) for key in keys] == list(range(500))
    assert [index.find(key) for key in sorted(keys)] == [keys.index(key) for key in sorted(keys)]
    assert index.find("other") is None
    assert index.duplicate() is None


class Colliding(str):
    __slots__ = ()

    def __hash__(self) -> int:
        return 0


def test_equal_hashes_are_not_equal_keys() -> None:
    keys = list(map(Colliding, "abc"))
    index = Index(array("q", map(hash, keys)), keys.__getitem__)
    assert [index.find(Colliding(key)) for key in "cbad"] == [2, 1, 0, None]
    assert index.duplicate() is None


def test_the_earliest_repetition_is_found() -> None:
    keys = list("abcbca")
    assert Index(array("q", map(hash, keys)), keys.__getitem__).duplicate() == (1, 3)

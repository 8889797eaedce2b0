"""Files appear whole or not at all, and say what they hold."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from acwb import files
from acwb.errors import AcwbError


@dataclass(frozen=True)
class Pair(files.Saved):
    """A value that goes to a file and back."""

    KIND = "Pair"
    left: int
    right: str

    @classmethod
    def of(cls, content: dict[str, object]) -> "Pair":  # type: ignore[override]
        return cls(int(content["left"]), str(content["right"]))  # type: ignore[call-overload]


def test_a_value_goes_to_a_file_and_back(tmp_path: Path) -> None:
    Pair(1, "two").save(tmp_path / "pair.json")
    assert Pair.load(tmp_path / "pair.json") == Pair(1, "two")
    assert json.loads((tmp_path / "pair.json").read_text()) == {"kind": "Pair", "version": 1, "left": 1, "right": "two"}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not a whole JSON file"),
        ('{"kind": "Plan", "version": 1}', "holds Plan, not a Pair"),
        ("[]", "holds something else, not a Pair"),
        ('{"kind": "Pair", "version": 2}', "was written in format version 2"),
        ('{"kind": "Pair", "version": 1, "left": 1}', "is not a Pair that this acwb can read"),
        ('{"kind": "Pair", "version": 1, "left": "one", "right": ""}', "is not a Pair that this acwb can read"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_in_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "pair.json").write_text(text)
    with pytest.raises(AcwbError, match=sentence):
        Pair.load(tmp_path / "pair.json")


def test_nothing_is_replaced_before_all_texts_are_on_disk(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("before")
    (tmp_path / "folder").mkdir()
    with pytest.raises(AcwbError, match="it is a folder"):
        files.write_texts({tmp_path / "one": "after", tmp_path / "folder": "text"})
    assert (tmp_path / "one").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one"]


def test_rows_become_a_table_with_every_column_that_any_row_has() -> None:
    assert files.rows_as_csv([{"a": 1}, {"a": 2.0, "b": 1 / 3}]).splitlines() == ["a,b", "1,", "2.0,0.3333333"]

"""Files appear whole or not at all, and say what they hold."""

import json
import os
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
    content = json.loads((tmp_path / "pair.json").read_text())
    assert len(content.pop("checksum")) == 16
    assert content == {"kind": "Pair", "version": 1, "left": 1, "right": "two"}


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


def test_a_file_without_a_checksum_loads_and_one_that_was_changed_does_not(tmp_path: Path) -> None:
    path = tmp_path / "pair.json"
    path.write_text('{"kind": "Pair", "version": 1, "left": 1, "right": "two"}')
    assert Pair.load(path) == Pair(1, "two")
    Pair(1, "two").save(path)
    path.write_text(path.read_text().replace('"left": 1', '"left": 2'))
    with pytest.raises(AcwbError, match="was changed after it was saved"):
        Pair.load(path)


def test_a_file_is_replaced_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "text"
    files.write_texts({path: "before " * 10_000})
    with path.open() as reader:
        files.write_texts({path: "after"})
        assert reader.read() == "before " * 10_000  # the old file is whole for whoever has it open
    assert path.read_text() == "after"
    assert [each.name for each in tmp_path.iterdir()] == ["text"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_follows_the_umask_and_an_old_one_keeps_its_mode(tmp_path: Path, umask: int, mode: int) -> None:
    path = tmp_path / "text"
    former = os.umask(umask)
    try:
        files.write_texts({path: "new"})
        assert path.stat().st_mode & 0o777 == mode
        path.chmod(0o640)
        files.write_texts({path: "again"})
    finally:
        os.umask(former)
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_symbolic_link_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("there already", "not yet"):
        link, target = tmp_path / f"link to {name}", tmp_path / "elsewhere" / name
        link.symlink_to(target)
    (tmp_path / "elsewhere" / "there already").write_text("before")
    for name in ("there already", "not yet"):
        files.write_texts({tmp_path / f"link to {name}": "after"})
        assert (tmp_path / f"link to {name}").is_symlink()
        assert (tmp_path / "elsewhere" / name).read_text() == "after"
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(AcwbError, match="leads nowhere"):
        files.write_texts({tmp_path / "loop": "after"})


@pytest.mark.parametrize("name", ["a\0b", "x" * 5000, "folder/" * 2000 + "x"])
def test_paths_that_no_file_can_have_get_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(AcwbError, match="Cannot write"):
        Pair(1, "two").save(f"{tmp_path}/{name}")
    with pytest.raises(AcwbError, match="Cannot read"):
        Pair.load(f"{tmp_path}/{name}")


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    Pair(1, "two").save(tmp_path / ("x" * 255))
    assert Pair.load(tmp_path / ("x" * 255)) == Pair(1, "two")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"kind": "Pair", "version": 1, "left": ' + "9" * 5000 + "}"])
def test_what_no_parser_takes_is_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "pair.json").write_text(text)
    with pytest.raises(AcwbError, match="is not a whole JSON file"):
        Pair.load(tmp_path / "pair.json")

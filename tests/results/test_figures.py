"""Files of figures: all formats, or html and CSV with one message; never half of them."""

import csv
from pathlib import Path

import pytest
from plotly import graph_objects

from acwb.errors import AcwbError
from acwb.results import figures

DATA = [{"x": 1, "y": 2}, {"x": 2, "y": 4, "z": "last"}]


@pytest.fixture
def figure() -> graph_objects.Figure:
    return graph_objects.Figure(graph_objects.Scatter(x=[1, 2], y=[2, 4]), {"title": {"text": "it doubles"}})


def test_a_figure_is_written_in_five_formats(figure: graph_objects.Figure, tmp_path: Path) -> None:
    paths = figures.save_figure(figure, "doubles", DATA, tmp_path / "new")
    assert {path.suffix for path in paths} == {".html", ".csv", ".svg", ".pdf", ".png"}
    signs = {".svg": b"<svg", ".pdf": b"%PDF", ".png": b"\x89PNG", ".html": b"it doubles"}
    for path in paths:
        assert signs.get(path.suffix, b"x,y,z") in path.read_bytes()
    assert {path.name for path in (tmp_path / "new").iterdir()} == {*(path.name for path in paths), "plotly.min.js"}
    assert "https://" not in (tmp_path / "new" / "doubles.html").read_text().split("<body>")[0]
    with (tmp_path / "new" / "doubles.csv").open() as file:
        assert [row["z"] for row in csv.DictReader(file)] == ["", "last"]


def test_a_table_has_seven_digits_and_every_byte(tmp_path: Path) -> None:
    path = figures.save_table("table", [{"ms": 1234.56789, "bytes": 1314229728, "share": 1.0}], tmp_path)
    assert path.read_text().split() == ["ms,bytes,share", "1234.568,1314229728,1.0"]


def test_without_a_browser_there_is_html_and_csv_and_one_message(
    figure: graph_objects.Figure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "_browser", lambda: False)
    with pytest.warns(UserWarning, match="No Chrome or Chromium was found"):
        paths = figures.save_figure(figure, "doubles", DATA, tmp_path)
    assert {path.suffix for path in paths} == {".html", ".csv"}
    assert {path.name for path in tmp_path.iterdir()} == {"doubles.html", "doubles.csv", "plotly.min.js"}


@pytest.mark.parametrize("name", ["", "../x", "a/b"])
def test_a_figure_needs_a_name_that_is_a_file_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(AcwbError, match="cannot be called"):
        figures.save_figure(None, name, [], tmp_path)


def test_a_folder_that_cannot_be_created_is_reported(figure: graph_objects.Figure, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AcwbError, match="Cannot write to"):
        figures.save_figure(figure, "doubles", DATA, tmp_path / "file" / "below")

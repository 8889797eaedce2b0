"""Writes figures for a report: html, svg, pdf, png and the numbers behind them as CSV, whole or not at all.

All html files of a folder share one copy of plotly's script, which lies beside them: they work without a network.
"""

import atexit
import os
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from acwb import files
from acwb.errors import AcwbError, warn_user

IMAGES = ("svg", "pdf", "png")
SCRIPT = "plotly.min.js"
PNG_SCALE = 1.5  # pixels of a png for each of the figure's; patterns in a pdf would grow with it, too


def save_figure(
    figure: Any, name: str, data: Iterable[Mapping[Any, Any]], folder: str | os.PathLike[str] = "results"
) -> tuple[Path, ...]:
    """Write a plotly figure and its data under `folder`: `name`.html, .csv, .svg, .pdf and .png.

    Images need Chrome or Chromium on the machine; without one, html and CSV are written, and one message says so.
    """
    if not name or Path(name).name != name:
        raise AcwbError(f"A figure cannot be called {name!r}: give a file name without an ending.")
    target = Path(folder)
    files.make_folder(target)
    texts: dict[str | os.PathLike[str], str] = {
        target / f"{name}.html": figure.to_html(include_plotlyjs="directory"),
        target / f"{name}.csv": files.rows_as_csv(data),
    }
    files.write_texts({**texts, **_script(target)})
    return (*(Path(path) for path in texts), *_images(figure, name, target))


def save_table(name: str, rows: Iterable[Mapping[Any, Any]], folder: str | os.PathLike[str] = "results") -> Path:
    """Write a table as CSV to `folder`/`name`.csv."""
    path = Path(folder) / f"{name}.csv"
    files.make_folder(path.parent)
    files.write_texts({path: files.rows_as_csv(rows)})
    return path


def _script(folder: Path) -> dict[str | os.PathLike[str], str]:
    """The file of plotly.js to write beside html figures, unless the folder has it."""
    from acwb.plots.theme import script

    return {} if (folder / SCRIPT).exists() else {folder / SCRIPT: script()}


def _images(figure: Any, name: str, folder: Path) -> list[Path]:
    """Write the figure as svg, pdf and png: all of them, or none without a browser."""
    if not _browser():
        warn_user(
            "No Chrome or Chromium was found: figures are written as html and CSV only. Install one for svg, pdf and "
            "png (Debian: apt-get install chromium)."
        )
        return []
    with tempfile.TemporaryDirectory(dir=folder, prefix=".") as scratch:
        made = [Path(scratch) / f"{name}.{kind}" for kind in IMAGES]
        for path in made:
            path.write_bytes(_image(figure, path.suffix[1:]))
        return [path.replace(folder / path.name) for path in made]


def _image(figure: Any, kind: str) -> bytes:
    import kaleido

    size = {"width": figure.layout.width, "height": figure.layout.height, "scale": PNG_SCALE if kind == "png" else 1}
    return bytes(kaleido.calc_fig_sync(figure, opts={"format": kind, **size}))


@cache
def _browser() -> bool:
    """Start the browser that renders images, once per process; False if none is installed."""
    import kaleido
    from choreographer.browsers.chromium import Chromium

    if Chromium.find_browser(skip_local=False) is None:
        return False
    page = kaleido.PageGenerator(mathjax=False)  # which it would fetch from the network
    kaleido.start_sync_server(page_generator=page, silence_warnings=True)
    atexit.register(kaleido.stop_sync_server, silence_warnings=True)
    return True

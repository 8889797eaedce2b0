"""Runs the notebooks top to bottom: `make run` at quick scale, `make results` at full scale.

A run at quick scale leaves the notebooks as they are. One at full scale puts its outputs into them, as images that can
be read where nothing runs, without the state of widgets. A notebook is replaced whole or not at all.
"""

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import acwb
from acwb import files
from acwb.errors import AcwbError

NOTEBOOKS = Path(acwb.__file__).parent.parent / "notebooks"
PARAMETERS = "parameters"
WIDGET = "application/vnd.jupyter.widget-view+json"
CLEAR_LINE = "\r\x1b[K"
CELL_TIMEOUT_SECONDS = 8 * 3600  # for one cell at full scale


def with_parameters(notebook: nbformat.NotebookNode, scale: str, folder: Path) -> nbformat.NotebookNode:
    """The notebook with another scale and another folder in its parameters cell."""
    (cell,) = [cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", ())]
    values = {"SCALE": scale, "RESULTS": str(folder)}
    lines = []
    for line in cell.source.splitlines():
        name = line.partition(" =")[0]
        lines.append(f'{name} = "{values[name]}"' if name in values else line)
    cell.source = "\n".join(lines)
    return notebook


def run_notebook(
    path: Path,
    scale: str,
    folder: Path,
    on_cell: Callable[[int, int], None] | None = None,
    stand_ins: Mapping[str, str] = MappingProxyType({}),
) -> nbformat.NotebookNode:
    """Run a notebook from its first cell to its last.

    Args:
        path: of the notebook.
        scale: one of `scales.SCALES`.
        folder: for its results.
        on_cell: `on_cell(number, total)` is called before each code cell.
        stand_ins: words of its code, with others to put in their places: smaller models, to see only that it runs.
    """
    from_there = Path(os.path.relpath(folder, path.parent))  # what a cell prints must not tell whose machine it was
    notebook = with_parameters(nbformat.read(path, as_version=4), scale, from_there)
    for cell in notebook.cells if stand_ins else ():
        for word, other in stand_ins.items():
            cell.source = re.sub(rf"\b{re.escape(word)}\b", other, cell.source)
    place = {"metadata": {"path": str(path.parent)}}
    quiet = ["--log-level=ERROR"]  # a kernel warns of its sockets, which are this machine's own
    code = [number for number, cell in enumerate(notebook.cells) if cell.cell_type == "code"]

    def starts(cell: nbformat.NotebookNode, cell_index: int) -> None:
        if on_cell is not None and cell.cell_type == "code":
            on_cell(code.index(cell_index) + 1, len(code))

    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_SECONDS, resources=place, extra_arguments=quiet, on_cell_start=starts
    )
    client.execute()
    return notebook


def without_transient_outputs(notebook: nbformat.NotebookNode, source: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook as it is kept: outputs of this run, sources as they were, no widgets, no progress bars."""
    for cell, before in zip(notebook.cells, source.cells, strict=True):
        cell.source = before.source
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not _is_transient(output)]
            cell.metadata.pop("execution", None)
    notebook.metadata.pop("widgets", None)
    return notebook


def _is_transient(output: nbformat.NotebookNode) -> bool:
    return output.get("name") == "stderr" or WIDGET in output.get("data", {})


def publish(scale: str, folder: Path, paths: Iterable[Path]) -> None:
    """Run notebooks, say at which cell each is and how long it took; at full scale, keep their outputs."""
    files.make_folder(folder)
    for path in paths:
        start = time.perf_counter()
        try:
            notebook = run_notebook(path, scale, folder, partial(_show_cell, path.name))
        except CellExecutionError as error:
            sys.stdout.write("stopped\n")
            raise AcwbError(f"{path.name} stopped at scale {scale}: {error}") from error
        if scale == "full":
            text = nbformat.writes(without_transient_outputs(notebook, nbformat.read(path, as_version=4)))
            files.write_texts({path: text + "\n"})
        clear = CLEAR_LINE if sys.stdout.isatty() else ""
        sys.stdout.write(f"{clear}{path.name}: {time.perf_counter() - start:,.0f} s\n")
        sys.stdout.flush()
    kinds = Counter(path.suffix for path in folder.rglob("*") if path.is_file())
    figures, tables = kinds[".html"], kinds[".csv"]
    sys.stdout.write(f"{figures} figures (html, svg, pdf, png) and {tables} tables (csv) are in {_shown(folder)}.\n")


def _show_cell(name: str, cell: int, cells: int) -> None:
    """Say at which cell a notebook is: on one line that is overwritten on a terminal, as lines in a log."""
    at = f"{name}: cell {cell} of {cells}"
    sys.stdout.write(f"{CLEAR_LINE}{at} …" if sys.stdout.isatty() else f"{at}\n")
    sys.stdout.flush()


def _shown(folder: Path) -> Path:
    return folder.relative_to(NOTEBOOKS.parent) if folder.is_relative_to(NOTEBOOKS.parent) else folder

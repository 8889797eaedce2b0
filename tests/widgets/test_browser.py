"""The widgets in JupyterLab, in a real browser: keys, clicks and typing in; plots, figures and files out."""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import ConsoleMessage, Locator, Page, expect, sync_playwright

import acwb
from acwb.experiments import notebooks
from acwb.experiments.notebooks import NOTEBOOKS

NAME = "04_plan_with_a_budget.ipynb"
TOKEN = "acwb"
QUIET = {"@jupyterlab/apputils-extension:announcements": True}  # it asks the network for news
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
MINUTE = 60_000  # ms
# From a key on the slider to the plot that it leads to. Some 40 ms of it are ours, the rest is the browser's drawing:
# 0.22 s were measured on an earlier machine, 0.31 s on another one, with nothing beside it.
MOST_SECONDS = 0.4
MOVES = 11

# Notes when a key goes down on the slider, and when the plot that changed after it has been drawn.
WATCH = """([slider, plot]) => {
    window.acwb = {pressed: 0, drawn: 0};
    slider.addEventListener("keydown", () => { window.acwb.pressed = performance.now(); }, true);
    plot.on("plotly_afterplot", () => requestAnimationFrame(() => { window.acwb.drawn = performance.now(); }));
}"""
WORDS = """() => [...document.querySelector(".acwb-explorer .js-plotly-plot")
    .querySelectorAll("text.gtitle, .annotation-text")].map((each) => each.textContent).join("; ")"""


@contextmanager
def opened(notebook: nbformat.NotebookNode, home: Path) -> Iterator[tuple[Page, list[str]]]:
    """A notebook in JupyterLab with all of its cells running; what the browser's console reports as errors."""
    folder = home / "notebooks"
    folder.mkdir()
    nbformat.write(notebook, folder / "notebook.ipynb")
    errors: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # JupyterLab's, of its server
            errors.append(f"{message.text} ({message.location})")

    with laboratory(folder, home) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        page = browser.new_page(viewport={"width": 1500, "height": 1900})
        page.on("console", note)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"{address}/lab/tree/notebook.ipynb?token={TOKEN}&reset")
        expect(page.get_by_text("| Idle").first).to_be_visible(timeout=2 * MINUTE)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_text("Run All Cells", exact=True).click()
        yield page, errors
        browser.close()


@contextmanager
def laboratory(folder: Path, home: Path) -> Iterator[str]:
    """JupyterLab on a port of its own, with settings of its own; its address."""
    (home / "labconfig").mkdir()
    (home / "labconfig" / "page_config.json").write_text(f'{{"disabledExtensions": {json.dumps(QUIET)}}}')
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--ServerApp.port={port}"),
        *("--ServerApp.ip=127.0.0.1", f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"),
    ]
    settings = {
        "JUPYTER_CONFIG_DIR": str(home),
        "JUPYTER_DATA_DIR": str(home),
        "JUPYTER_RUNTIME_DIR": str(home / "run"),
    }
    with (home / "laboratory.log").open("w") as log:
        server = subprocess.Popen(command, env={**os.environ, **settings}, stdout=log, stderr=log)
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_for(f"{address}/api/status?token={TOKEN}", server)
            yield address
        finally:
            server.terminate()
            server.wait()


def _wait_for(address: str, server: "subprocess.Popen[bytes]", seconds: float = 120) -> None:
    for _ in range(int(seconds / 0.2)):
        assert server.poll() is None, "JupyterLab ended by itself: see its log"
        try:
            with urllib.request.urlopen(address) as answer:
                answer.read()
            return
        except urllib.error.URLError:
            time.sleep(0.2)
    raise AssertionError(f"JupyterLab does not answer after {seconds} s")


def said(page: Page) -> str:
    """All that is written in the timeline: the finding, the budget, the peaks."""
    return str(page.evaluate(f"({WORDS})()"))


def moved(page: Page, slider: Locator, key: str) -> float:
    """Press a key on the slider; the seconds until the plot has changed and is drawn."""
    before = said(page)
    slider.press(key)
    page.wait_for_function(f"(before) => window.acwb.drawn > window.acwb.pressed && ({WORDS})() !== before", arg=before)
    return float(page.evaluate("(window.acwb.drawn - window.acwb.pressed) / 1e3"))


def typed(explorer: Locator, text: str) -> None:
    """Type a budget and confirm it."""
    field = entry(explorer, "exactly")
    field.fill(text)
    field.press("Enter")


def entry(widget: Locator, name: str) -> Locator:
    """A control by its description."""
    return widget.locator(".widget-inline-hbox", has_text=name).locator("input, select").first


@pytest.mark.slow
def test_a_person_explores_budgets(tmp_path: Path) -> None:
    source = nbformat.read(NOTEBOOKS / NAME, as_version=4)
    with opened(notebooks.with_parameters(source, "quick", tmp_path / "results"), tmp_path) as (page, errors):
        seconds = explored(page, tmp_path / "results" / "explorer")
    assert errors == []
    assert statistics.median(seconds) <= MOST_SECONDS


def explored(page: Page, folder: Path) -> list[float]:
    """Move, type, pick, pin and export; the seconds of each move."""
    explorer = page.locator(".acwb-explorer").first
    explorer.wait_for(timeout=8 * MINUTE)
    explorer.scroll_into_view_if_needed()
    slider, plot = explorer.get_by_role("slider").first, explorer.locator(".js-plotly-plot").first
    plot.wait_for()
    page.evaluate(WATCH, [slider.element_handle(), plot.element_handle()])
    slider.focus()
    seconds = [moved(page, slider, "ArrowLeft") for _ in range(MOVES)]
    keep_picture(page, "slider")
    figures = explorer.locator(".acwb-figures")
    typed(explorer, "3 GB")  # more than the step needs
    expect(figures).to_contain_text("above static −0.0%")
    typed(explorer, "1.05")
    expect(plot).to_contain_text("budget 1.050 GiB")
    expect(figures).not_to_contain_text("above static −0.0%")
    now = figures.inner_text(), said(page)
    for wrong, message in (("", "The entry is empty"), ("much", "'much' cannot be read"), ("0.1", "No plan fits")):
        typed(explorer, wrong)
        expect(explorer.locator(".acwb-message")).to_contain_text(message)
        assert (figures.inner_text(), said(page)) == now

    entry(explorer, "planner").select_option("mu_two")
    expect(figures).to_contain_text("mu_two")
    entry(explorer, "planner").select_option("frontier")
    expect(figures).to_contain_text("frontier")

    row = explorer.locator(".acwb-table tbody tr", has_text="RECOMPUTE").first
    name = row.get_attribute("data-activation")
    row.click()
    expect(explorer).to_contain_text("is dropped after")
    explorer.get_by_role("button", name="keep", exact=True).click()
    pinned = explorer.locator(f'.acwb-table tr[data-activation="{name}"]')
    expect(pinned).to_contain_text("RETAINED", timeout=MINUTE)
    keep_picture(page, "pinned")

    explorer.get_by_role("button", name="export").click()
    expect(explorer.locator(".acwb-message")).to_contain_text("written to ", timeout=MINUTE)
    written = {path.name for path in folder.iterdir()}
    assert written >= {
        *("plan.json", "ac_decisions.csv", "checkpoint_plan.csv"),
        *(f"before_and_after.{kind}" for kind in ("html", "csv", "svg", "pdf", "png")),
    }
    keep_picture(page, "exported")
    return seconds


BOARD = """from acwb.widgets import sweep_board
sweep_board(["resnet18"], folder="board", rounds=3)"""


@pytest.mark.slow
def test_a_person_sweeps_batch_sizes(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS / NAME, as_version=4)
    notebook.cells = [nbformat.v4.new_code_cell(BOARD)]
    with opened(notebook, tmp_path) as (page, errors):
        board = page.locator(".jp-OutputArea-output").last
        sizes, start = entry(board, "batch sizes"), board.get_by_role("button", name="start")
        message, cancel = board.locator(".acwb-message"), board.get_by_role("button", name="cancel")
        sizes.fill("2, many", timeout=2 * MINUTE)
        start.click()
        expect(message).to_contain_text("'many' is not a batch size")
        entry(board, "less by %").fill("30")
        sizes.fill("2, 4")
        start.click()
        expect(message).to_contain_text("1 of 2 batch sizes are measured", timeout=4 * MINUTE)
        expect(board.locator(".bars .point").first).to_be_visible()
        expect(message).to_contain_text("Done: 2 batch sizes", timeout=4 * MINUTE)
        keep_picture(page, "sweep")
        sizes.fill("8, 16")
        start.click()
        expect(message).to_contain_text("Measuring resnet18 at batch 8, 16")
        cancel.click()
        expect(message).to_contain_text("Cancelled; 0 of 2", timeout=MINUTE)
        expect(start).to_be_enabled()
    assert errors == []
    kept = acwb.Sweep.load(tmp_path / "notebooks" / "board" / "sweep_resnet18_30.json")
    assert [point.batch_size for point in kept.points] == [2, 4]


def keep_picture(page: Page, name: str) -> None:
    """A screenshot for whoever looks at the test's results, outside of the tree."""
    folder = Path(tempfile.gettempdir()) / "acwb-screenshots"
    folder.mkdir(exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")

"""The notebooks: how they are written, and (slow) that each runs alone, top to bottom, and leaves what it promises."""

import re
from pathlib import Path

import nbformat
import pytest

from acwb.experiments import notebooks
from acwb.experiments.__main__ import main
from acwb.experiments.notebooks import NOTEBOOKS, PARAMETERS, WIDGET

NAMES = [
    *("01_capture_a_training_step", "02_profile_resnet152", "03_profile_bert", "04_plan_with_a_budget"),
    *("05_rewrite_and_verify", "06_batch_sweep", "07_against_the_alternatives", "08_figures_for_the_report"),
]
LONG = NAMES[4:7]  # they make many processes, each of which captures: on smaller models, but for one of each kind
SMALLER = {"acwb.models.resnet152": "acwb.models.resnet18", "acwb.models.bert": "acwb.models.tiny_bert"}
MOST_LINES = 15
STARTS = {"html": b"<!doctype html>", "svg": b"<svg", "pdf": b"%PDF", "png": b"\x89PNG"}  # of whole files
PROFILE = ("profiler_stats_node_stats.csv", "profiler_stats_activation_stats.csv")
TABLES = {
    NAMES[1]: tuple(f"resnet152/{table}" for table in PROFILE),
    NAMES[2]: tuple(f"bert/{table}" for table in PROFILE),
    NAMES[3]: ("resnet152/ac_decisions.csv", "resnet152/checkpoint_plan.csv"),
    NAMES[7]: ("08_summary.csv", "08_profiles.csv", "08_batches.csv"),
}


def read(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def test_the_notebooks_are_numbered_from_one_to_eight() -> None:
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_has_question_answer_figure_and_short_cells(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    first, *_, last = notebook.cells
    for word in (f"# {int(name[:2])} · ", "**Question.**", "**Answer.**", "**Figure"):
        assert word in first.source
    assert "## What was learned" in last.source
    (link,) = re.findall(r"\]\((\w+)\.ipynb\)", last.source)
    assert link == NAMES[NAMES.index(name) + 1 - len(NAMES)]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    prose = [cell for cell in notebook.cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(code) / 2
    assert code[0].source.count("import") >= 2
    assert [PARAMETERS in cell.metadata.get("tags", ()) for cell in code].index(True) == 1
    for cell in code:
        assert len(cell.source.splitlines()) <= MOST_LINES
        assert not re.search(r"sys\.path|^[!%]", cell.source, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_a_committed_notebook_has_outputs_without_widgets_or_errors(name: str) -> None:
    notebook = read(name)
    assert "widgets" not in notebook.metadata
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    for output in (output for cell in code for output in cell.outputs):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
        assert WIDGET not in output.get("data", {})
        assert "application/vnd.plotly.v1+json" not in output.get("data", {})


def test_parameters_are_set_and_nothing_else() -> None:
    before, after = read(NAMES[0]), notebooks.with_parameters(read(NAMES[0]), "full", Path("elsewhere"))
    changed = [
        (one.source, two.source) for one, two in zip(before.cells, after.cells, strict=True) if one.source != two.source
    ]
    assert [text for _, text in changed] == ['SCALE = "full"\nRESULTS = "elsewhere"']


def test_a_scale_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["notebooks", "huge"])
    assert "invalid choice: 'huge'" in capsys.readouterr().err


def test_a_run_says_at_which_cell_it_is_and_what_it_left_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells = [nbformat.v4.new_code_cell("SCALE = 'quick'"), nbformat.v4.new_code_cell("open('t.csv', 'w').close()")]
    cells[0].metadata["tags"] = [PARAMETERS]
    source = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# 1"), *cells])
    nbformat.write(source, tmp_path / "09_own.ipynb")
    notebooks.publish("quick", tmp_path, [tmp_path / "09_own.ipynb"])
    first, second, done, left = capsys.readouterr().out.splitlines()
    assert (first, second) == ("09_own.ipynb: cell 1 of 2", "09_own.ipynb: cell 2 of 2")
    assert re.fullmatch(r"09_own.ipynb: \d+ s", done)
    assert left == f"0 figures (html, svg, pdf, png) and 1 tables (csv) are in {tmp_path}."


def test_a_published_notebook_has_no_widgets_and_its_original_sources() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 2")], metadata={"widgets": {}})
    image = nbformat.v4.new_output("display_data", {"image/png": ""})
    view = nbformat.v4.new_output("display_data", {WIDGET: {}})
    printed = nbformat.v4.new_output("stream", name="stdout", text="measured now")
    notebook.cells[0].outputs = [image, view, printed, nbformat.v4.new_output("stream", name="stderr", text="50%")]
    source = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")])
    kept = notebooks.without_transient_outputs(notebook, source)
    assert kept.cells[0].outputs == [image, printed]
    assert kept.cells[0].source == "x = 1"
    assert "widgets" not in kept.metadata


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the results of all notebooks, which use each other's where they find them."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.slow
@pytest.mark.xdist_group("notebooks")  # in their order and in one process: they use each other's results
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_and_leaves_what_it_promises(name: str, folder: Path) -> None:
    stand_ins = SMALLER if name in LONG else {}
    notebook = notebooks.run_notebook(NOTEBOOKS / f"{name}.ipynb", "smoke", folder, stand_ins=stand_ins)
    promised = set(re.findall(r'save_figure\(figure, "(\w+)"', "".join(cell.source for cell in notebook.cells)))
    assert promised
    for figure in promised:
        for kind, start in STARTS.items():
            assert (folder / f"{figure}.{kind}").read_bytes().startswith(start)
        assert "Plotly.newPlot" in (folder / f"{figure}.html").read_text()
        assert len((folder / f"{figure}.csv").read_text().splitlines()) > 1
    for table in TABLES.get(name, ()):
        assert len((folder / table).read_text().splitlines()) > 2
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            assert output.output_type != "error"
            assert "Traceback" not in output.get("text", "")

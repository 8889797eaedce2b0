"""Modules import in one direction, and what must stay light imports nothing heavy. Read off the import statements."""

import ast
from pathlib import Path

import acwb

FOLDER = Path(acwb.__file__).parent

# A module imports only from its left.
LINE = [
    *("errors", "units", "archive", "graph", "schedule", "costs"),
    *(
        "kernels",
        "transaction",
        "shortcuts",
        "binder",
        "step",
        "surveyor",
        "assembler",
        "recorder",
        "eager",
        "guard",
        "checker",
        "tracer",
    ),
    *("device", "profiler", "prober", "scheduler", "simulator"),
    *("planners.budgets", "planners.pins", "planners.frame", "planners.arrangement", "planners.bounds", "plans"),
    *("planners.habits", "planners.mu_two", "planners.frontier", "planners.optimal", "planner"),
    *("rewriter", "splitter", "outputs", "program", "runtime", "blocks"),
    *("models", "contenders", "launcher", "meters", "limiter", "verifier", "measurer", "sweeper", "sizer", "contest"),
    *("plots.theme", "plots.timelines", "plots.profiles", "plots.comparisons", "plots.drawings", "plots"),
    *("records", "results", "keeper", "explorer", "conductor", "widgets"),
]
BESIDE = {"compatibility", "bench", "tradeoff", "scales", "publisher"}
ONLY_IN = {
    "torchvision": {"models"},
    "transformers": {"models"},
    "plotly": {*(module for module in LINE if module.startswith("plots.")), "widgets"},
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
}
WITHOUT_TORCH = {
    *("errors", "units", "archive", "graph", "schedule", "costs", "scheduler", "simulator"),
    *("plans", "planners.budgets", "planners.pins", "planners.habits", "planners.arrangement", "planners.frontier"),
    *("planners.frame", "planners.bounds", "planners.mu_two", "planners.optimal", "planner"),
}


def path_of(module: str) -> Path:
    path = FOLDER / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def imports(module: str) -> set[str]:
    """Every module that `module` imports anywhere, ours as "acwb.name"."""
    found = set()
    for node in ast.walk(ast.parse(path_of(module).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            source = node.module or ""
            found |= {f"acwb.{alias.name}" for alias in node.names} if source == "acwb" else {source}
    return found


def own_imports(module: str) -> set[str]:
    return {name.removeprefix("acwb.") for name in imports(module) if name.startswith("acwb.")}


def test_every_module_has_its_place() -> None:
    found = {".".join(path.relative_to(FOLDER).with_suffix("").parts) for path in FOLDER.rglob("*.py")}
    found = {name.removesuffix(".__init__") for name in found} - {"__init__", "planners"}
    assert found == {*LINE, *BESIDE}


def test_modules_import_only_from_their_left() -> None:
    for position, module in enumerate(LINE):
        assert own_imports(module) <= set(LINE[:position]), module


def test_models_stand_beside_the_line() -> None:
    assert own_imports("models") <= {"errors"}
    assert own_imports("compatibility") == set()


def test_the_vocabulary_needs_no_torch() -> None:
    for module in WITHOUT_TORCH:
        assert own_imports(module) <= WITHOUT_TORCH
        assert not any(name.split(".")[0] == "torch" for name in imports(module)), module


def test_frames_cost_nothing_until_they_are_asked_for() -> None:
    """pandas is imported inside the functions that give frames, and nowhere else in the package."""
    for module in (*LINE, *BESIDE):
        tree = ast.parse(path_of(module).read_text())
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert "pandas" not in {alias.name for node in top for alias in node.names}, module


def test_heavy_libraries_are_imported_in_one_place_each() -> None:
    for module in (*LINE, *BESIDE):
        for library, places in ONLY_IN.items():
            if any(name.split(".")[0] == library for name in imports(module)):
                assert module in places, f"{module} imports {library}"

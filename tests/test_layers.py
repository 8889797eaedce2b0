"""Packages import in one direction, and what must stay light imports nothing heavy. Read off the import statements."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import acwb

FOLDER = Path(acwb.__file__).parent

# A layer imports only from itself and from the layers above it in this list.
LAYERS = [
    {"errors", "_torchvision_shim", "_torch", "rng", "bitwise"},
    {"units", "value_checks", "rollback", "subject"},
    {"files", "models"},
    {"core"},
    {"capture"},
    {"profiling"},
    {"planning"},
    {"execution"},
    {"evaluation"},
    {"plots"},
    {"results"},
    {"widgets"},
    {"experiments"},
]
WITHOUT_TORCH = {"errors", "units", "files", "value_checks", "core", "planning"}
ONLY_IN = {
    "torchvision": {"models"},
    "transformers": {"models"},
    "plotly": {"plots", "widgets"},
    "ipywidgets": {"widgets"},
    "anywidget": {"widgets"},
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module of the package, by its dotted name without "acwb."."""
    for path in sorted(FOLDER.rglob("*.py")):
        parts = path.relative_to(FOLDER).with_suffix("").parts
        if parts != ("__init__",):
            yield ".".join(part for part in parts if part != "__init__"), ast.parse(path.read_text())


TREES = dict(modules())


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if module.split(".")[0] in layer)


def imports(module: str) -> set[str]:
    """Every module that `module` imports anywhere, ours without "acwb."; the rest by its package."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            source = node.module or ""
            names = {f"{source}.{alias.name}" for alias in node.names}
            inner = {name.removeprefix("acwb.") for name in names} & TREES.keys()
            found |= inner or {source.removeprefix("acwb.") if source.startswith("acwb.") else source.split(".")[0]}
    return found


def own_imports(module: str) -> set[str]:
    return imports(module) & TREES.keys()


def test_every_module_belongs_to_a_layer() -> None:
    assert {module.split(".")[0] for module in TREES} == set().union(*LAYERS)


def test_imports_go_one_way_between_packages() -> None:
    for module in TREES:
        for imported in own_imports(module):
            is_same = imported.split(".")[0] == module.split(".")[0]
            assert is_same or layer_of(imported) < layer_of(module), f"{module} imports {imported}"


def test_imports_within_a_package_have_no_cycle() -> None:
    TopologicalSorter({module: own_imports(module) - {module.split(".")[0]} for module in TREES}).prepare()


def test_core_and_planning_need_no_torch() -> None:
    for module in TREES:
        if module.split(".")[0] in WITHOUT_TORCH:
            assert {name.split(".")[0] for name in own_imports(module)} <= WITHOUT_TORCH, module
            assert "torch" not in imports(module), module


def test_pandas_is_imported_only_inside_functions() -> None:
    """It takes half a second, and most of the package never needs it."""
    for module, tree in TREES.items():
        top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        assert "pandas" not in {alias.name for node in top for alias in node.names}, module


def test_heavy_libraries_are_imported_in_one_package_each() -> None:
    for module in TREES:
        for library, places in ONLY_IN.items():
            if library in imports(module):
                assert module.split(".")[0] in places, f"{module} imports {library}"


# Where names of torch with a leading underscore may stand: what a new release may change.
PRIVATE_TORCH = ("_torch", "capture.", "evaluation.baselines", "execution.block_checkpoint")


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private modules that are imported from torch, and private attributes of torch, of tensors and of storages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            names = (*(node.module or "").split("."), *(alias.name for alias in node.names))
            yield from (name for name in names if name.startswith("_"))
        elif isinstance(node, ast.Attribute):
            path = ast.unparse(node)
            of_torch = path.startswith("torch.") and not path.startswith("torch.ops.") and "._" in path
            if (of_torch and not node.attr.startswith("__")) or node.attr in ("_cdata", "_version", "kineto_results"):
                yield node.attr


def test_private_names_of_torch_stay_in_four_places() -> None:
    for module, tree in TREES.items():
        if not module.startswith(PRIVATE_TORCH):
            assert set(private_names(tree)) == set(), module
    assert {"_AutoDispatchBelowAutograd", "_cdata", "_version"} <= set(private_names(TREES["_torch"]))


def test_no_two_modules_share_a_name_or_differ_by_a_plural() -> None:
    names = [module.split(".")[-1].removesuffix("s") for module in TREES]
    assert sorted(name for name in names if names.count(name) > 1) == []


def test_no_two_public_classes_share_a_name_or_differ_by_a_plural() -> None:
    classes = [node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)]
    names = [name.removesuffix("s") for name in classes if not name.startswith("_")]
    assert sorted(name for name in names if names.count(name) > 1) == []


def test_nine_of_ten_functions_are_shorter_than_25_lines() -> None:
    lengths = sorted(
        (node.end_lineno or 0) - node.lineno + 1
        for tree in TREES.values()
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    assert lengths[len(lengths) * 9 // 10] < 25


def test_no_folder_has_more_than_fifteen_files() -> None:
    for folder in {path.parent for path in FOLDER.rglob("*.py")}:
        assert len([path for path in folder.iterdir() if path.is_file()]) <= 15, folder

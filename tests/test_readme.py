"""The front pages: their code prints what they show, their numbers are generated, their links and names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from acwb.experiments.results_page import END, START, render, with_headline

ROOT = Path(__file__).parent.parent
README, RESULTS_PAGE, MAP = (ROOT / name for name in ("README.md", "results/README.md", "acwb/README.md"))
PAGES = (README, RESULTS_PAGE, MAP)
RESULTS = ROOT / "results" / "full"
PACKAGE = ROOT / "acwb"

MOST_LINES = 170
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(), re.DOTALL)
VERSION = r"(?:torch|Python|version)(?:==| )[\d.]*\d"
MEASURED = r"\d\.\d+|[+−]\d+|\d(?:×|e-\d)|[\d,.]+ ?(?:%|ms|s|minutes|rounds|GiB)(?!\w)"
OLD_WORDS = (
    *("plain PyTorch", "contender", "contest", "made again", "make again", "to the bit", "bit for bit", "what people"),
    *("proved: no plan", "rival"),
)


def without_code(text: str) -> str:
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def without_generated_part(text: str) -> str:
    return text.partition(START)[0] + text.partition(END)[2]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=["your_model", "look_inside"][: len(EXAMPLES)])
def test_an_example_prints_the_block_after_it(code: str, printed: str, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_blocks_compile(page: Path) -> None:
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(code, str(page), "exec")


def test_both_examples_are_followed_by_what_they_print() -> None:
    assert len(EXAMPLES) == README.read_text().count("```python") == 2


def test_the_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= MOST_LINES


def test_the_results_page_is_generated() -> None:
    assert RESULTS_PAGE.read_text() == render(RESULTS)


def test_the_table_of_results_is_generated() -> None:
    assert README.read_text() == with_headline(README.read_text(), RESULTS)


def test_measured_numbers_are_quoted_only_where_they_are_generated() -> None:
    prose = re.sub(VERSION, "", without_code(without_generated_part(README.read_text())))
    prose = re.sub(
        r'width="\d+%"|`"\d+(?:%|GiB)"`|μ-TWO: 3×', "", prose
    )  # images, budgets as they are written, a title
    assert re.findall(MEASURED, prose) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r'\]\(([^)]+)\)|src="([^"]+)"', page.read_text())
    assert links
    for path, _, anchor in ("".join(link).partition("#") for link in links):
        if "://" not in path:
            target = page.parent / path if path else page
            assert target.exists(), path
            assert not anchor or anchor in anchors(target), anchor


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_one_word_for_each_thing(page: Path) -> None:
    text = " ".join(without_code(page.read_text()).split())
    assert [word for word in OLD_WORDS if word in text] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_tables_are_rectangular(page: Path) -> None:
    for table in re.findall(r"(?:^\|.*\|\n)+", without_code(page.read_text()), re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_the_map_names_every_package_and_module() -> None:
    text = MAP.read_text().split("## Packages and modules")[1].split("## Where to find")[0]
    rows = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    named = [name.split("/")[-1] for row in rows for name in re.findall(r"`([^`]+)`", row)]
    modules = [path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__"]
    assert sorted(named) == sorted(modules)
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert set(re.findall(r"\*\*`(\w+)`\*\*", text)) == packages


def test_every_place_on_the_map_exists() -> None:
    text = MAP.read_text().split("## Where to find")[1].split("## Limits")[0]
    places = re.findall(r"`((?:tests/)?[a-z_]+/[a-z_]+(?:\.py)?)`", text)
    assert len(places) > 10
    for place in places:
        path = (ROOT if place.startswith("tests/") else PACKAGE) / place
        assert path.with_suffix(".py").exists(), place


def test_the_results_stay_small() -> None:
    assert sum(path.stat().st_size for path in RESULTS.rglob("*")) < 25e6

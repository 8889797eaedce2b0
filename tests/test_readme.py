"""The README's code runs and prints what the README shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.slow
def test_the_first_code_block_prints_the_block_after_it() -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README.read_text(), re.DOTALL)[0]
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == printed


def test_every_module_is_in_the_readme() -> None:
    table = README.read_text().split("## Where things are")[1].split("## Limits")[0]
    modules = {path.stem for path in (README.parent / "acwb").glob("*.py")} - {
        "__init__",
        "errors",
        "units",
        "archive",
        "compatibility",
    }
    assert {module for module in modules if f"`{module}`" not in table} == set()

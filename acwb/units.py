"""Reads a budget as a person gives it: bytes, "1.5GiB", or "60%" of what the step needs unplanned."""

import math
import re

from acwb.errors import AcwbError

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
SIZE_HINT = 'give bytes as a whole number, or text like "1.5GiB" or "60%"'


def parse_bytes(budget: int | float | str, baseline: int) -> int:
    """`budget` in bytes; `baseline` is the peak of the unplanned step."""
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise AcwbError(f"A budget of {budget!r} is not a size: {SIZE_HINT}.")
    if isinstance(budget, str):
        size = _parse_text(budget, baseline)
    elif math.isfinite(budget):
        size = int(budget)
    else:
        raise AcwbError(f"A budget of {budget!r} is not a size: {SIZE_HINT}.")
    if size <= 0:
        raise AcwbError(f"A budget of {budget!r} leaves no memory at all: {SIZE_HINT}.")
    return size


def _parse_text(text: str, baseline: int) -> int:
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(%|[A-Za-z]+)\s*", text)
    if match is None or (match[2] != "%" and match[2] not in UNITS):
        raise AcwbError(f"A budget of {text!r} cannot be read: {SIZE_HINT}.")
    amount = float(match[1])
    if match[2] != "%":
        return int(amount * UNITS[match[2]])
    if amount > 100:
        raise AcwbError(
            f"A budget of {text!r} is more than the step needs without a plan ({format_bytes(baseline)}): give 100 % "
            "or less."
        )
    return int(amount * baseline / 100)


GIBIBYTE = 2**30


def format_bytes(size: int) -> str:
    """`size` bytes as a person reads it: `format_bytes(3 * 2**29)` is '1.500 GiB'."""
    amount = size / GIBIBYTE
    return f"{amount:,.3f} GiB" if amount >= 0.001 or size == 0 else f"{amount:.2g} GiB"


def format_seconds(seconds: float) -> str:
    """`seconds` as a person reads it: `format_seconds(0.25)` is '250.0 ms'."""
    amount = seconds * 1e3
    return f"{amount:,.1f} ms" if amount >= 0.1 or seconds == 0 else f"{amount:.2g} ms"

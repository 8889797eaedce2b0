"""Sizes and times as people write and read them: `parse_bytes("1.5GiB")`, `format_bytes`, `format_seconds`.

Everywhere else bytes are `int` and seconds `float`.
"""

import math
import numbers
import re

from acwb.errors import AcwbError, quoted

UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GIBIBYTE = UNITS["GiB"]
MAX_BYTES = 2**62
MAX_TEXT = 60  # characters of a size: a regular expression takes its time over thirty thousand
SIZE_HINT = 'give bytes as a whole number, or text like "1.5GiB" or "60%"'


def format_bytes(size: int) -> str:
    """`size` bytes for people: `format_bytes(3 * 2**29)` is '1.500 GiB'."""
    amount = size / GIBIBYTE
    return f"{amount:,.3f} GiB" if amount >= 0.001 or size == 0 else f"{amount:.2g} GiB"


def format_seconds(seconds: float) -> str:
    """`seconds` for people: `format_seconds(0.25)` is '250.0 ms'."""
    amount = seconds * 1e3
    return f"{amount:,.1f} ms" if amount >= 0.1 or seconds == 0 else f"{amount:.2g} ms"


def parse_bytes(size: int | float | str, relative_to: int | None = None, default_unit: str | None = None) -> int:
    """A budget or another amount of memory in bytes.

    Args:
        size: bytes, text with a unit ("1.5GiB"), or a percentage ("60%").
        relative_to: what a percentage refers to: the peak of the step without a plan.
        default_unit: the unit of text without one, as somebody types it into a field; there, a comma is a point, too.
    """
    if isinstance(size, str):
        amount = _parse_text(size, relative_to, default_unit)
    elif isinstance(size, numbers.Real) and not isinstance(size, bool) and math.isfinite(size):  # numpy's numbers, too
        amount = int(size)
    else:
        raise AcwbError(f"A budget of {quoted(size)} is not a size: {SIZE_HINT}.")
    if amount <= 0:
        raise AcwbError(f"A budget of {quoted(size)} leaves no memory at all: {SIZE_HINT}.")
    if amount > MAX_BYTES:
        raise AcwbError(f"A budget of {quoted(size)} is more memory than any machine has: {SIZE_HINT}.")
    return amount


def _parse_text(text: str, relative_to: int | None, default_unit: str | None) -> int:
    if default_unit is not None:
        text = text.strip().replace(",", ".")
        if not text:
            raise AcwbError(
                f'The entry is empty: type a budget in {default_unit}, like 1.5, or with its unit, like "1500MiB".'
            )
    text = text.strip()
    match = len(text) <= MAX_TEXT and re.fullmatch(r"(-?(?:\d+\.?\d*|\.\d+)(?:e-?\d+)?)\s*(%|[A-Za-z]*)", text)
    unit = (match[2] or default_unit) if match else None
    amount = float(match[1]) if match else math.inf
    if unit is None or (unit != "%" and unit not in UNITS) or not math.isfinite(amount):
        raise AcwbError(f"A budget of {quoted(text)} cannot be read: {SIZE_HINT}.")
    if unit != "%":
        return int(amount * UNITS[unit])
    if relative_to is None:
        raise AcwbError(f'A budget of {text!r} is a part of nothing here: give bytes, or text like "1.5GiB".')
    if amount > 100:
        raise AcwbError(
            f"A budget of {text!r} is more than the step needs without a plan ({format_bytes(relative_to)}): give "
            "100 % or less."
        )
    return int(amount * relative_to / 100)

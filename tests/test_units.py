"""Sizes and times, written for people and read back."""

import pytest

from acwb.errors import AcwbError
from acwb.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0.000 GiB"), (3 * 2**29, "1.500 GiB"), (2**20, "0.00098 GiB"), (2**41, "2,048.000 GiB")],
)
def test_bytes_are_written_in_gibibytes(size: int, text: str) -> None:
    assert format_bytes(size) == text


@pytest.mark.parametrize(("seconds", "text"), [(0, "0.0 ms"), (0.25, "250.0 ms"), (2e-5, "0.02 ms"), (3, "3,000.0 ms")])
def test_seconds_are_written_in_milliseconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("typed", "size"),
    [("1.5", 3 * 2**29), ("1,5", 3 * 2**29), (" 2 ", 2**31), ("1500MiB", 1500 * 2**20), ("50%", 2**29), (7, 7)],
)
def test_a_typed_number_without_a_unit_has_the_default_one(typed: str | int, size: int) -> None:
    assert parse_bytes(typed, relative_to=2**30, default_unit="GiB") == size


@pytest.mark.parametrize(
    ("size", "sentence"),
    [
        ("5", "'5' cannot be read"),
        ("60%", "is a part of nothing here"),
        ("1e999GiB", "cannot be read"),
        ("-1GiB", "leaves no memory at all"),
        (float("nan"), "is not a size"),
        (True, "is not a size"),
    ],
)
def test_what_is_no_size_is_refused_with_its_value(size: object, sentence: str) -> None:
    with pytest.raises(AcwbError, match=sentence):
        parse_bytes(size)  # type: ignore[arg-type]


def test_an_empty_entry_asks_for_one() -> None:
    with pytest.raises(AcwbError, match="The entry is empty: type a budget in GiB"):
        parse_bytes("  ", default_unit="GiB")

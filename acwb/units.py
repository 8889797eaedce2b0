"""How sizes are written for people. Elsewhere bytes are `int` and seconds `float`; GiB and ms are for reading."""

GIBIBYTE = 2**30


def gibibytes(size: int) -> str:
    """`size` bytes as a person reads it: `gibibytes(3 * 2**29)` is '1.500 GiB'."""
    amount = size / GIBIBYTE
    return f"{amount:,.3f} GiB" if amount >= 0.001 or size == 0 else f"{amount:.2g} GiB"


def milliseconds(seconds: float) -> str:
    """`seconds` as a person reads it: `milliseconds(0.25)` is '250.0 ms'."""
    amount = seconds * 1e3
    return f"{amount:,.1f} ms" if amount >= 0.1 or seconds == 0 else f"{amount:.2g} ms"

"""How sizes are written for people. Elsewhere bytes are `int` and seconds `float`; GiB and ms are for reading."""

GIBIBYTE = 2**30


def gibibytes(size: int) -> str:
    """`size` bytes as a person reads it: `gibibytes(3 * 2**29)` is '1.500 GiB'."""
    amount = size / GIBIBYTE
    return f"{amount:,.3f} GiB" if amount >= 0.001 or size == 0 else f"{amount:.2g} GiB"

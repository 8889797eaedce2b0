"""`make fuzz SECONDS=600`: random models until the time is up; prints the seed of whatever does not hold."""

import sys
import time
import traceback
from collections import Counter

import torch

from fuzz.check import HELD, REFUSED, check


def main(seconds: float, first: int) -> int:
    """Run from seed `first` on; the number of seeds that failed."""
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    end = time.monotonic() + seconds
    seed = first
    while time.monotonic() < end:
        try:
            outcome = check(seed)
        except Exception:  # every failure is reported, and the next seed is tried
            counts["failed"] += 1
            print(f"seed {seed} failed:\n{traceback.format_exc(limit=-3)}", flush=True)
        else:
            counts[outcome.split(":")[0]] += 1
            if outcome != HELD:
                print(f"seed {seed} {outcome}", flush=True)
        seed += 1
    print(f"seeds {first} to {seed - 1}: {counts[HELD]} held, {counts[REFUSED]} refused, {counts['failed']} failed")
    return counts["failed"]


if __name__ == "__main__":
    sys.exit(bool(main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)))

"""The whole trade-off between memory and time, from keeping everything down to the floor.

At the peak of the moment, drop what saves most bytes there for each second that it costs, with chains that share what
is alive; a drop that would raise another peak is not taken. Whatever was dropped earlier and would fit again is kept
again. Every state that no other one beats is a point of the frontier.
"""

from dataclasses import dataclass

import numpy

from acwb.planners.arrangement import Arrangement, Frame

Chains = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Point:
    """A state on the way down: what runs again before which op, and what that costs."""

    peak_bytes: int
    seconds: float
    chains: Chains


def descend(frame: Frame) -> list[Point]:
    """All non-dominated points that are met, from the largest peak to the floor."""
    descent = _Descent(frame)
    descent.run()
    return undominated(descent.points)


def undominated(points: list[Point]) -> list[Point]:
    """Those that no other point beats in both memory and time, from the largest peak to the smallest."""
    found: list[Point] = []
    best = float("inf")
    for point in sorted(points, key=lambda point: (point.peak_bytes, point.seconds)):
        if point.seconds < best:
            found.append(point)
            best = point.seconds
    return found[::-1]


class _Descent:
    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.state = Arrangement(frame)
        self.points: list[Point] = []
        self.size = numpy.array(frame.size, dtype=float)
        usable = [may and size > 0 for may, size in zip(frame.droppable, frame.size, strict=True)]
        self.usable = numpy.array(usable)
        self.scores = numpy.zeros(len(frame.names))  # seconds for each byte, as far as known

    def run(self) -> None:
        tidy_below = self.state.peak()[1]
        baseline = tidy_below
        while True:
            slot, peak = self.state.peak()
            if peak < tidy_below:
                self._tidy(peak)
                tidy_below = peak - baseline // 200
            self.points.append(Point(peak, self.state.seconds, self.state.snapshot()))
            if not self._drop(slot, peak):
                return

    def _drop(self, slot: int, peak: int) -> bool:
        """Drop the cheapest storage that waits at `slot`; False where nothing can be dropped without a new peak."""
        state = self.state
        open_at = state.waits_from < slot + (slot % 2 == 0)
        candidates = self.usable & open_at & (state.waits_to // 2 * 2 > slot)
        known = numpy.where(candidates, self.scores, numpy.inf)
        fresh: set[int] = set()
        while True:
            each = int(known.argmin())
            if known[each] == numpy.inf:
                return False
            mark, before = state.mark(), state.seconds
            self._take(each, peak)
            score = (state.seconds - before) / self.frame.size[each]
            if each not in fresh and score > known[each]:
                state.revert(mark)
                known[each] = self.scores[each] = score
                fresh.add(each)
            elif int(state.need[slot]) < peak and state.peak()[1] <= peak:
                self.scores[each] = 0.0  # whatever it waits for next is another matter
                return True
            else:
                state.revert(mark)
                known[each] = numpy.inf

    def _take(self, each: int, limit: int) -> None:
        """Drop a storage; what is made again for it is kept, if there is room, until it would be made again anyway."""
        state = self.state
        chain = state.chain(each, int(state.waits_to[each]) // 2)
        state.apply(chain)
        for op in chain.added:
            if later := state.run_later(op, chain.rank):
                state.release(*later, limit)

    def _tidy(self, limit: int) -> None:
        """Keep again whatever fits, the most expensive first."""
        seconds = self.frame.seconds
        pairs = [(rank, op) for rank, ops in self.state.chains.items() for op in ops]
        for rank, op in sorted(pairs, key=lambda pair: -seconds[pair[1]]):
            if op in self.state.chains.get(rank, ()):
                self.state.release(rank, op, limit)

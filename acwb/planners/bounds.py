"""What no plan can do without: a proved lower bound on the extra time that a budget costs.

The step is cut at a few ops. At each cut, what is in memory must fit; between two cuts, whatever an op reads was there
at the cut or was made again since, and an op that was run several times is charged once. Every plan satisfies that, so
the least time that does, with fractions allowed, is below that of every plan: a linear program (HiGHS).
"""

import math
from collections.abc import Iterable

import numpy
from scipy.optimize import linprog
from scipy.sparse import csr_array

from acwb.costs import Profile
from acwb.graph import Phase
from acwb.planners.arrangement import Frame
from acwb.planners.budgets import budget_bytes

CUTS = 6  # more of them prove a little more, and take longer
SAFETY = 1e-6  # the solver's answer is exact to about a tenth of this


def lower_bound(profile: Profile, budget: int | float | str, cuts: int = CUTS) -> float:
    """Seconds that every plan for `budget` takes longer than the step without a plan, at least.

    Args:
        profile: what `acwb.profile` gave, or a file of it.
        budget: bytes, "1.5GiB", or "60%" of the peak without a plan.
        cuts: at how many points memory is looked at.

    Returns:
        The seconds; infinity, if no plan at all fits the budget.
    """
    size = budget_bytes(budget, profile.peak_bytes)
    graph = profile.graph
    need = numpy.array(graph.live_bytes) + [profile.workspace_bytes[op.name] for op in graph.ops]
    over = numpy.flatnonzero(need > size)
    if not len(over):
        return 0.0
    relaxation = _Relaxation(Frame(profile), size)
    if any(relaxation.least(rank) > size for rank in over.tolist()):
        return math.inf
    chosen = {int(over[round(at)]) for at in numpy.linspace(0, len(over) - 1, max(1, cuts - 1))}
    return relaxation.solve(sorted({*chosen, profile.peak_rank}))


Name = tuple[str, int, int]
Term = tuple[Name, float]


class _Relaxation:
    def __init__(self, frame: Frame, size: int) -> None:
        self.frame = frame
        self.size = size
        ops = frame.graph.ops
        self.again = [op.phase is not Phase.OPTIMIZER and bool(op.outputs) and not op.mutates for op in ops]

    def least(self, rank: int) -> int:
        """What op `rank` needs at least."""
        frame = self.frame
        touched = {*frame.makes[rank], *frame.reads[rank]}
        return frame.graph.static_bytes + sum(frame.size[each] for each in touched) + frame.workspace[rank]

    def makers(self, each: int) -> list[int]:
        """The ops and shortcuts that make a storage again."""
        maker = self.frame.maker[each]
        if not self.again[maker]:
            return []
        return [maker, maker + self.frame.count] if each in self.frame.short_of else [maker]

    def wanted(self, start: int, stop: int) -> set[int]:
        """Storages from before op `start` that the ops after it, up to but not including `stop`, read."""
        slots = range(2 * start + 2, 2 * stop)
        return {
            each
            for each, uses in enumerate(self.frame.uses)
            if self.frame.maker[each] < start and any(use in slots for use in uses)
        }

    def solve(self, cuts: list[int]) -> float:
        """The least extra time that satisfies everything, in seconds."""
        frame, program = self.frame, _Program()
        there = [self._useful(cut) for cut in cuts]
        runs = [{op for each in useful for op in self.makers(each)} for useful in there]
        for number, cut in enumerate(cuts):
            for each in there[number]:
                program.add(("there", number, each), 0.0, lower=float(2 * cut + 1 in frame.uses[each]))
            for op in runs[number]:
                program.add(("run", number, op), frame.seconds[op])
        for number, cut in enumerate(cuts):
            self._fit(program, number, cut, there[number])
            is_last = number + 1 == len(cuts)
            for each in self.wanted(cut, frame.count + 1 if is_last else cuts[number + 1]):
                program.at_least(self._had(number, each), 1.0)
            for op in runs[number]:
                for each in frame.reads[op]:
                    program.at_least([*self._had(number, each), (("run", number, op), -1.0)], 0.0)
            for each in there[number] & there[number + 1] if not is_last else ():
                program.at_least([*self._had(number, each), (("there", number + 1, each), -1.0)], 0.0)
        return program.least() * (1 - SAFETY)

    def _had(self, number: int, each: int) -> list[Term]:
        """A storage from before a cut is there after it: because it was at the cut, or is made again since."""
        return [(("there", number, each), 1.0), *((("run", number, op), 1.0) for op in self.makers(each))]

    def _fit(self, program: "_Program", number: int, cut: int, there: set[int]) -> None:
        """What is there at a cut fits into the budget, beside what its op makes."""
        frame = self.frame
        room = self.size - frame.graph.static_bytes - frame.workspace[cut]
        room -= sum(frame.size[each] for each in frame.makes[cut])
        terms = [(("there", number, each), -frame.size[each] / self.size) for each in there]
        program.at_least(terms, -room / self.size)

    def _useful(self, cut: int) -> set[int]:
        """Storages from before a cut that can be of use after its op has started."""
        frame = self.frame
        waiting = [
            each for each, uses in enumerate(frame.uses) if frame.maker[each] < cut and uses and uses[-1] > 2 * cut
        ]
        found = set(waiting)
        while waiting:
            for op in self.makers(waiting.pop()):
                for each in frame.reads[op]:
                    if each not in found:
                        found.add(each)
                        waiting.append(each)
        return found


class _Program:
    """A linear program by names: variables between a lower limit and 1, with a cost each."""

    def __init__(self) -> None:
        self._numbers: dict[Name, int] = {}
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._limits: list[float] = []

    def add(self, name: Name, cost: float, lower: float = 0.0) -> None:
        """A variable."""
        self._numbers[name] = len(self._costs)
        self._costs.append(cost)
        self._lower.append(lower)

    def at_least(self, terms: Iterable[Term], limit: float) -> None:
        """A sum that is not below a limit."""
        for name, value in terms:
            self._rows.append(len(self._limits))
            self._columns.append(self._numbers[name])
            self._values.append(-value)
        self._limits.append(-limit)

    def least(self) -> float:
        """The least cost; infinity where nothing satisfies all."""
        shape = (len(self._limits), len(self._costs))
        matrix = csr_array((self._values, (self._rows, self._columns)), shape=shape)
        bounds = numpy.array([self._lower, numpy.ones(len(self._lower))]).T
        found = linprog(self._costs, A_ub=matrix, b_ub=self._limits, bounds=bounds, method="highs")
        if found.status == 2:  # infeasible
            return math.inf
        if found.status != 0:
            raise ArithmeticError(found.message)
        return max(0.0, float(found.fun))

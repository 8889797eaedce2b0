"""What no plan can do without: a proved lower bound on the extra time that a budget costs.

Look at the step while one of its ops runs. What is in memory there must fit; and whatever is read later was there, or
is made again after that, from what was there or is made again, too; an op that runs again several times is charged
once. Every plan satisfies that. So the least time that does, with fractions allowed, is below that of every plan: a
linear program (HiGHS). The best of a few such looks counts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
from scipy.optimize import linprog
from scipy.sparse import csr_array

from acwb.core.graph_arrays import Array
from acwb.core.profile import Profile
from acwb.errors import AcwbError
from acwb.planning.problem import PlanningProblem
from acwb.units import parse_bytes

MAX_PROGRAMS = 8  # 0.2 s for ResNet-152
SOLVER_TOLERANCE = 1e-6  # the solver's answer is exact to about a tenth of this


def lower_bound(profile: Profile, budget: int | float | str) -> float:
    """Seconds that every plan for `budget` takes longer than the step without a plan, at least.

    Args:
        profile: what `acwb.profile` gave, or a file of it.
        budget: bytes, "1.5GiB", or "60%" of the peak without a plan.

    Returns:
        The seconds; infinity, if no plan at all fits the budget.

    Example:
        >>> acwb.lower_bound(profile, "1.5GiB") / profile.step_seconds
    """
    size = parse_bytes(budget, profile.peak_bytes)
    need = _bytes_needed(profile)
    over = numpy.flatnonzero(need > size)
    if not len(over):
        return 0.0
    relaxation = _Relaxation(PlanningProblem(profile), size)
    if any(relaxation.least(rank) > size for rank in over.tolist()):
        return math.inf
    parts = numpy.array_split(over, min(MAX_PROGRAMS, len(over)))
    return max(relaxation.solve(int(part[need[part].argmax()]))[0] for part in parts)


@dataclass(frozen=True)
class PeakRelaxation:
    """What would best be there while an op runs, if nothing but that moment had to fit.

    Attributes:
        rank: the op at which most memory is needed without a plan.
        kept: the storages that would be there, by number, mostly or wholly.
    """

    rank: int
    kept: frozenset[int]


def relax_at_peak(problem: PlanningProblem, size: int) -> PeakRelaxation | None:
    """What would best be there at the peak of the step without a plan, if `size` bytes were given; None: too little."""
    rank = int(_bytes_needed(problem.profile).argmax())
    _, there = _Relaxation(problem, size).solve(rank)
    return PeakRelaxation(rank, frozenset(each for each, part in there.items() if part >= 0.5)) if there else None


def _bytes_needed(profile: Profile) -> Array:
    """The bytes that every op needs without a plan."""
    graph = profile.graph
    return numpy.array(graph.live_bytes) + [profile.workspace_bytes[op.name] for op in graph.ops]


Variable = tuple[str, int]
Term = tuple[Variable, float]


class _Relaxation:
    def __init__(self, problem: PlanningProblem, size: int) -> None:
        self.problem = problem
        self.size = size

    def least(self, rank: int) -> int:
        """What op `rank` needs at least."""
        problem = self.problem
        touched = {*problem.makes[rank], *problem.reads[rank]}
        return problem.graph.static_bytes + sum(problem.size[each] for each in touched) + problem.workspace[rank]

    def makers(self, each: int) -> list[int]:
        """The ops and recompute rules that make a storage again."""
        maker = self.problem.maker[each]
        op = self.problem.graph.ops[maker]
        if not op.recomputable:
            return []
        has_shortcut = op.name in self.problem.profile.rules
        is_first = self.problem.makes[maker][0] == each
        return [maker, maker + self.problem.count] if has_shortcut and is_first else [maker]

    def solve(self, rank: int) -> tuple[float, dict[int, float]]:
        """The least extra seconds that satisfy all that follows from op `rank`; which part of what is there then."""
        problem, program = self.problem, _LinearProgram()
        there = self._useful(rank)
        runs = {op for each in there for op in self.makers(each)}
        for each in there:
            program.add(("there", each), 0.0, lower=float(2 * rank + 1 in problem.uses[each]))
        for op in runs:
            program.add(("run", op), problem.seconds[op])
        room = self.size - problem.graph.static_bytes - problem.workspace[rank] - problem.new_bytes[rank]
        program.at_least([(("there", each), -problem.size[each] / self.size) for each in there], -room / self.size)
        for each in self._read_after(rank):
            program.at_least(self._had(each), 1.0)
        for op in runs:
            for each in problem.reads[op]:
                program.at_least([*self._had(each), (("run", op), -1.0)], 0.0)
        seconds, found = program.least()
        return seconds * (1 - SOLVER_TOLERANCE), {
            each: value for (kind, each), value in found.items() if kind == "there"
        }

    def _had(self, each: int) -> list[Term]:
        """A storage is there, or made again."""
        return [(("there", each), 1.0), *((("run", op), 1.0) for op in self.makers(each))]

    def _read_after(self, rank: int) -> list[int]:
        """Storages from before op `rank` that later ops read."""
        problem = self.problem
        return [
            each
            for each, uses in enumerate(problem.uses)
            if problem.maker[each] < rank and uses and uses[-1] > 2 * rank + 1
        ]

    def _useful(self, rank: int) -> set[int]:
        """Storages from before op `rank` that can be of use when it runs, or later."""
        problem = self.problem
        waiting = [*self._read_after(rank), *problem.reads[rank]]
        found = set(waiting)
        while waiting:
            for op in self.makers(waiting.pop()):
                for each in problem.reads[op]:
                    if each not in found:
                        found.add(each)
                        waiting.append(each)
        return found


class _LinearProgram:
    """A linear program by names: variables between a lower limit and 1, with a cost each."""

    def __init__(self) -> None:
        self._numbers: dict[Variable, int] = {}
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._limits: list[float] = []

    def add(self, name: Variable, cost: float, lower: float = 0.0) -> None:
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

    def least(self) -> tuple[float, dict[Variable, float]]:
        """The least cost, and the variables that give it; infinity and none where nothing satisfies all."""
        shape = (len(self._limits), len(self._costs))
        matrix = csr_array((self._values, (self._rows, self._columns)), shape=shape)
        bounds = numpy.array([self._lower, numpy.ones(len(self._lower))]).T
        found = linprog(self._costs, A_ub=matrix, b_ub=self._limits, bounds=bounds, method="highs")
        if found.status == 2:  # infeasible
            return math.inf, {}
        if found.status != 0:
            raise AcwbError(f"The solver gave no lower bound: {found.message}")
        return max(0.0, float(found.fun)), dict(zip(self._numbers, found.x.tolist(), strict=True))

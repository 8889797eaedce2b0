"""Lower bound on the recomputation time of any plan within a budget, by LP relaxation.

Fix one op. Everything alive while it runs must fit the budget, and every storage read later is either alive there or
recomputed afterwards from storages that are; an op that is recomputed several times is charged once. Every schedule
satisfies this; relaxing it to fractions gives a linear program (HiGHS), whose optimum is a lower bound. The best over
up to eight ops counts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy
from scipy.optimize import linprog
from scipy.sparse import csr_array

from acwb.core.graph_arrays import Array
from acwb.core.profile import Profile
from acwb.errors import AcwbError, check_type
from acwb.planning.problem import PlanningProblem, slot_of
from acwb.units import parse_bytes

MAX_PROGRAMS = 8  # together they take 0.2 s for ResNet-152
SOLVER_TOLERANCE = 1e-6  # relative; the solver is exact to about a tenth of this


def lower_bound(profile: Profile, budget: int | float | str) -> float:
    """Lower bound on the seconds that any plan within `budget` adds to the step.

    Args:
        profile: the result of `acwb.profile`, or of `Profile.load`.
        budget: bytes, "1.5GiB", or "60%" of the peak without a plan.

    Returns:
        The seconds; infinity if no plan fits the budget.

    Example:
        >>> acwb.lower_bound(profile, "1.5GiB") / profile.step_seconds
    """
    check_type("lower_bound", profile, Profile, "acwb.profile")
    size = parse_bytes(budget, profile.peak_bytes)
    needed = _bytes_needed(profile)
    over = numpy.flatnonzero(needed > size)
    if not len(over):
        return 0.0
    relaxation = _Relaxation(PlanningProblem(profile), size)
    if any(relaxation.working_set_bytes(rank) > size for rank in over.tolist()):
        return math.inf
    parts = numpy.array_split(over, min(MAX_PROGRAMS, len(over)))
    return max(relaxation.solve(int(part[needed[part].argmax()]))[0] for part in parts)


@dataclass(frozen=True)
class PeakRelaxation:
    """The linear program's choice of live storages at the peak op.

    Attributes:
        rank: the op at which the step without a plan has its peak.
        kept: the storages of which the solution keeps at least half.
    """

    rank: int
    kept: frozenset[int]


def relax_at_peak(problem: PlanningProblem, size: int) -> PeakRelaxation | None:
    """Solve the linear program at the peak of the step without a plan; None where `size` bytes are too few."""
    rank = int(_bytes_needed(problem.profile).argmax())
    _, live = _Relaxation(problem, size).solve(rank)
    return PeakRelaxation(rank, frozenset(storage for storage, part in live.items() if part >= 0.5)) if live else None


def _bytes_needed(profile: Profile) -> Array:
    """The bytes that each op of the step without a plan needs."""
    graph = profile.graph
    return numpy.array(graph.live_bytes) + [profile.workspace_bytes[op.name] for op in graph.ops]


Variable = tuple[
    str, int
]  # ("live", storage): the part that is alive at the op; ("run", op): the part that is recomputed
Term = tuple[Variable, float]


class _Relaxation:
    """The linear programs of one problem and budget."""

    def __init__(self, problem: PlanningProblem, size: int) -> None:
        self.problem = problem
        self.size = size

    def working_set_bytes(self, rank: int) -> int:
        """The bytes without which op `rank` cannot run: static memory, inputs, outputs, workspace."""
        problem = self.problem
        touched = {*problem.makes[rank], *problem.reads[rank]}
        return problem.graph.static_bytes + sum(problem.size[storage] for storage in touched) + problem.workspace[rank]

    def recomputing_ops(self, storage: int) -> list[int]:
        """The ops and recompute rules that give a storage once more."""
        problem = self.problem
        maker = problem.maker[storage]
        op = problem.graph.ops[maker]
        if not op.recomputable:
            return []
        has_rule = op.name in problem.profile.rules and problem.makes[maker][0] == storage
        return [maker, problem.rule_of(maker)] if has_rule else [maker]

    def solve(self, rank: int) -> tuple[float, dict[int, float]]:
        """The least extra seconds under the constraints of op `rank`, and the part of each storage alive there."""
        problem, program = self.problem, _LinearProgram()
        storages = self._useful(rank)
        ops = {op for storage in storages for op in self.recomputing_ops(storage)}
        for storage in storages:
            program.add(("live", storage), 0.0, lower=float(slot_of(rank) in problem.uses[storage]))
        for op in ops:
            program.add(("run", op), problem.seconds[op])
        room = self.size - problem.graph.static_bytes - problem.workspace[rank] - problem.new_bytes[rank]
        sizes: list[Term] = [(("live", storage), -problem.size[storage] / self.size) for storage in storages]
        program.at_least(sizes, -room / self.size)
        for storage in self._read_after(rank):
            program.at_least(self._available(storage), 1.0)
        for op in ops:
            for storage in problem.reads[op]:
                program.at_least([*self._available(storage), (("run", op), -1.0)], 0.0)
        seconds, values = program.minimize()
        live = {storage: value for (kind, storage), value in values.items() if kind == "live"}
        return seconds * (1 - SOLVER_TOLERANCE), live

    def _available(self, storage: int) -> list[Term]:
        """A storage is alive at the op, or recomputed after it."""
        return [(("live", storage), 1.0), *((("run", op), 1.0) for op in self.recomputing_ops(storage))]

    def _read_after(self, rank: int) -> list[int]:
        """Storages from before op `rank` that later ops read."""
        problem = self.problem
        return [
            storage
            for storage, uses in enumerate(problem.uses)
            if problem.maker[storage] < rank and uses and uses[-1] > slot_of(rank)
        ]

    def _useful(self, rank: int) -> set[int]:
        """Storages that op `rank`, a later op, or a recomputation for one of them can read."""
        problem = self.problem
        pending = [*self._read_after(rank), *problem.reads[rank]]
        useful = set(pending)
        while pending:
            for op in self.recomputing_ops(pending.pop()):
                for storage in problem.reads[op]:
                    if storage not in useful:
                        useful.add(storage)
                        pending.append(storage)
        return useful


class _LinearProgram:
    """A linear program with named variables between a lower limit and 1, each with a cost."""

    def __init__(self) -> None:
        self._numbers: dict[Variable, int] = {}
        self._costs: list[float] = []
        self._lower: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._limits: list[float] = []

    def add(self, name: Variable, cost: float, lower: float = 0.0) -> None:
        """Add a variable."""
        self._numbers[name] = len(self._costs)
        self._costs.append(cost)
        self._lower.append(lower)

    def at_least(self, terms: Iterable[Term], limit: float) -> None:
        """Require a weighted sum of variables to be at least `limit`."""
        for name, value in terms:
            self._rows.append(len(self._limits))
            self._columns.append(self._numbers[name])
            self._values.append(-value)
        self._limits.append(-limit)

    def minimize(self) -> tuple[float, dict[Variable, float]]:
        """The least cost with the values that give it; infinity and none if the program is infeasible."""
        if not self._costs:  # which the solver refuses: every sum is zero
            return (0.0 if min(self._limits, default=0.0) >= 0 else math.inf), {}
        shape = (len(self._limits), len(self._costs))
        matrix = csr_array((self._values, (self._rows, self._columns)), shape=shape)
        bounds = numpy.array([self._lower, numpy.ones(len(self._lower))]).T
        solution = linprog(self._costs, A_ub=matrix, b_ub=self._limits, bounds=bounds, method="highs")
        if solution.status == 2:  # infeasible
            return math.inf, {}
        if solution.status != 0:
            raise AcwbError(f"The solver gave no lower bound: {solution.message}")
        return max(0.0, float(solution.fun)), dict(zip(self._numbers, solution.x.tolist(), strict=True))

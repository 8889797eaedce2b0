"""The plans of a drop-in model, the least recently used of which are given up beyond a bound."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

from acwb.errors import warn_user
from acwb.execution.autograd_function import PlannedCall
from acwb.execution.tangent_layouts import Layout

MAX_PLANS = 16


class PlanCache:
    """The planned calls of a model, by spec of the arguments and layout of the tangents.

    A copy of the model has none: they are for the very tensors that they were made with.
    """

    def __init__(self) -> None:
        self._calls: OrderedDict[tuple[Hashable, Layout], PlannedCall] = OrderedDict()
        self._expected: dict[Hashable, Layout] = {}
        self._warned = False

    def get(self, spec: Hashable) -> PlannedCall | None:
        """The call for arguments of this spec and tangents of the layout that came last; None if there is none yet."""
        key = (spec, self._expected.get(spec, ()))
        if key in self._calls:
            self._calls.move_to_end(key)
        return self._calls.get(key)

    def expected(self, spec: Hashable) -> Layout | None:
        """The layout in which tangents came last, after arguments of this spec."""
        return self._expected.get(spec)

    def expect(self, spec: Hashable, layout: Layout) -> None:
        """Take the layout of tangents that came after arguments of this spec for that of the next ones."""
        self._expected[spec] = layout

    def put(self, spec: Hashable, call: PlannedCall) -> None:
        """Add a call; beyond the bound, the one that was not used for the longest time is given up, told once."""
        self.expect(spec, call.layout)
        self._calls[spec, call.layout] = call
        if len(self._calls) <= MAX_PLANS:
            return
        (oldest, _), _ = self._calls.popitem(last=False)
        if all(known != oldest for known, _ in self._calls):
            del self._expected[oldest]
        if not self._warned:
            self._warned = True
            warn_user(
                f"More than {MAX_PLANS} plans were made for this model, each for inputs of another spec, and the least "
                "recently used one is given up now and whenever one more is made: pad inputs to a few shapes, and pass "
                "numbers that change as tensors."
            )

    def __iter__(self) -> Iterator[PlannedCall]:
        return iter(self._calls.values())

    def __len__(self) -> int:
        return len(self._calls)

    def __deepcopy__(self, memo: dict[int, Any]) -> "PlanCache":
        return PlanCache()

    def __reduce__(self) -> tuple[type["PlanCache"], tuple[()]]:
        return PlanCache, ()

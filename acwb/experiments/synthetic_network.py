"""A synthetic residual network of any number of ops, to see how planning time grows."""

import random

from acwb.core.graph import Environment, Op, Phase, Role, StepGraph, Storage
from acwb.core.profile import Conditions, Profile

OPS_OF_A_BLOCK = 16


class ResidualNetwork:
    """Draws a synthetic step: blocks of two convolutions with normalization, around which the input is added."""

    def __init__(self, ops: int) -> None:
        self.ops: list[Op] = []
        self.sizes = {"x": 4096}
        self.gradients: dict[str, str] = {}
        self.made_by: dict[str, str] = {}
        blocks = max(1, ops // OPS_OF_A_BLOCK)
        results = ["x"]
        for block in range(blocks):
            results.append(self._forward(f"block.{block}", results[-1], 4096 >> (4 * block // blocks)))
        self._add(Phase.FORWARD, "loss", "", results[-1:], {"loss": 1})
        self._add(Phase.BACKWARD, "grad", "", results[-1:], {"grad": self.sizes[results[-1]]})
        gradient = "grad"
        for block in reversed(range(blocks)):
            gradient = self._backward(f"block.{block}", gradient, results[block])
        for weight, each in self.gradients.items():
            self._add(Phase.OPTIMIZER, f"{weight}.step", "", [each, weight], {}, mutates=(weight,))

    def _forward(self, block: str, start: str, size: int) -> str:
        value = start
        for layer in ("1", "2"):
            weight, conv, norm, relu = (f"{block}.{kind}{layer}" for kind in ("weight", "conv", "norm", "relu"))
            self.sizes[weight] = 64
            self._add(Phase.FORWARD, conv, block, [value, weight], {conv: size})
            self._add(Phase.FORWARD, norm, block, [conv], {f"{norm}:0": size, f"{norm}:1": 4})
            value = f"{norm}:0"
            if layer == "2":
                self._add(Phase.FORWARD, f"{block}.sum", block, [value, start], {f"{block}.sum": size})
                value = f"{block}.sum"
            self._add(Phase.FORWARD, relu, block, [value], {relu: size})
            value = relu
        return value

    def _backward(self, block: str, gradient: str, start: str) -> str:
        ahead = gradient
        for layer, before in (("2", f"{block}.relu1"), ("1", start)):
            weight, conv, norm, relu = (f"{block}.{kind}{layer}" for kind in ("weight", "conv", "norm", "relu"))
            size = self.sizes[conv]
            self._add(Phase.BACKWARD, f"{relu}.back", block, [gradient, relu], {f"{relu}.back": size})
            if layer == "2":
                ahead = f"{relu}.back"
            reads = [f"{relu}.back", conv, f"{norm}:1"]
            self._add(Phase.BACKWARD, f"{norm}.back", block, reads, {f"{norm}.back": size})
            made = {f"{conv}.back:0": self.sizes[before], f"{conv}.back:1": 64}
            self._add(Phase.BACKWARD, f"{conv}.back", block, [f"{norm}.back", before, weight], made)
            self.gradients[weight] = f"{conv}.back:1"
            gradient = f"{conv}.back:0"
        self._add(Phase.BACKWARD, f"{block}.back", block, [gradient, ahead], {f"{block}.back": self.sizes[gradient]})
        return f"{block}.back"

    def _add(
        self,
        phase: Phase,
        name: str,
        module: str,
        reads: list[str],
        makes: dict[str, int],
        mutates: tuple[str, ...] = (),
    ) -> None:
        needs = dict.fromkeys(self.made_by[each] for each in reads if each in self.made_by)
        self.ops.append(Op(name, "synthetic", phase, module, tuple(needs), tuple(reads), tuple(makes), mutates))
        self.sizes.update(makes)
        self.made_by.update(dict.fromkeys(makes, name))

    def profile(self) -> Profile:
        """The step with the time of each op after its kind and the bytes that it touches."""
        forward = {name for op in self.ops if op.phase is Phase.FORWARD for name in op.outputs}
        kept = forward & {name for op in self.ops if op.phase is Phase.BACKWARD for name in op.inputs}
        known = {
            **dict.fromkeys(self.gradients, Role.PARAMETER),
            **dict.fromkeys(self.gradients.values(), Role.GRADIENT),
            **dict.fromkeys(kept, Role.ACTIVATION),
            "x": Role.INPUT,
        }
        graph = StepGraph(
            tuple(self.ops),
            tuple(Storage(name, size, known.get(name, Role.OTHER)) for name, size in self.sizes.items()),
            "loss",
            tuple(self.gradients.items()),
            Environment("", "synthetic", "ResidualNetwork", "", "", ()),
        )
        chance = random.Random(0)
        seconds = {
            op.name: (8 if "conv" in op.name else 1)
            * chance.uniform(0.9, 1.1)
            * sum(self.sizes[name] for name in op.inputs)
            for op in self.ops
        }
        nothing = dict.fromkeys((each.name for each in graph.activations), 0.0)
        workspace = dict.fromkeys(seconds, 0)
        return Profile(graph, seconds, workspace, nothing, nothing, Conditions("synthetic", 1, 1, swapped=False))

"""The vocabulary of a training step, without torch: ops, storages, phases, roles, activations.

A `StepGraph` is one whole iteration (forward, loss, backward, optimizer) in the order in which it runs. Memory belongs
to storages, not to tensors: a view has the storage of its base, and a storage lives until the last use of any alias.
Ops have the names of their FX nodes. The graph holds sizes and names, no measurements and no tensors, so it can be
saved on one machine and planned on another.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Any

from acwb import files
from acwb.errors import AcwbError
from acwb.units import format_bytes
from acwb.value_checks import check_fields


class Phase(StrEnum):
    """The phases of an iteration, in the order in which they run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Role(StrEnum):
    """The purpose of a storage."""

    PARAMETER = "parameter"
    BUFFER = "buffer"  # also the next value of a buffer, until it is written back
    INPUT = "input"
    ACTIVATION = "activation"  # saved for backward: made in the forward phase, read in the backward phase
    GRADIENT = "gradient"  # ends up in a parameter's `.grad`
    OPTIMIZER_STATE = "optimizer state"
    OTHER = "other"  # temporaries and the loss


def output_name(op: str, position: int) -> str:
    """The storage of output number `position` of an op with several outputs; an only output is called like its op."""
    return f"{op}:{position}"


def output_position(name: str) -> int:
    """The position that `output_name` put into the name of a storage."""
    return int(name.rpartition(":")[2])


@dataclass(frozen=True)
class Storage:
    """A block of memory, shared by a tensor and all its views.

    Attributes:
        name: the op that makes it (`relu_17`, or `native_layer_norm_3:1` for one of several outputs); for static
            memory, its path (`fc.weight`, `batch[0]`, `fc.weight:momentum_buffer`).
    """

    name: str
    bytes: int
    role: Role


@dataclass(frozen=True)
class Op:
    """One node of the step.

    Attributes:
        name: its FX node name.
        target: the function it calls (`aten.relu.default`).
        module: path of the module that called it, or whose backward it is (`layer3.4.conv2`).
        needs: the ops whose results it is called with, views included.
        inputs: the storages it reads.
        outputs: the storages it makes; none for a view or an in-place op.
        mutates: the storages that it writes into.
        holds: storages kept alive through this op without being read by it (optimizer temporaries, incoming tangents).
        random: whether it draws random numbers.
        view: whether its result shares the storage of its input.
        rule_inputs: the storages that its recompute rule reads: a cheaper kernel that gives its first output, from its
            inputs and its other outputs. Empty without a rule.
        recomputes: in a rewritten step, the op of which this is a recomputation.
        once: not recomputable, because its result crosses the boundary of the step.
    """

    name: str
    target: str
    phase: Phase
    module: str = ""
    needs: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    random: bool = False
    view: bool = False
    rule_inputs: tuple[str, ...] = ()
    recomputes: str = ""
    once: bool = False

    @property
    def recomputable(self) -> bool:
        """Whether a second run gives the same result and does nothing else; an op of the optimizer never does."""
        has_result = self.view or bool(self.outputs)
        return self.phase is not Phase.OPTIMIZER and not self.mutates and not self.once and has_result

    def results(self, by_rule: bool = False) -> tuple[str, ...]:
        """The storages that a run makes: all outputs, or only the first one by the recompute rule."""
        return self.outputs[:1] if by_rule else self.outputs


@dataclass(frozen=True)
class Activation:
    """A storage saved for backward, with the ranks (positions in `StepGraph.ops`) of its uses."""

    name: str
    bytes: int
    op: str
    module: str
    creation_rank: int
    last_forward_rank: int
    first_backward_rank: int
    last_backward_rank: int


@dataclass(frozen=True)
class Environment:
    """The circumstances of a capture: torch, device, model, optimizer, default dtype and batch.

    Attributes:
        dtype: the dtypes of the parameters, for readers of a file; nothing depends on it.
        random_state_bytes: the size of an RNG state, one of which is saved for each random op that is recomputed.
    """

    torch: str
    device: str
    model: str
    optimizer: str
    dtype: str
    batch: tuple[str, ...]
    random_state_bytes: int = 0


@dataclass(frozen=True, repr=False)
class StepGraph:
    """One training iteration as ops and storages, in the order in which it runs.

    Attributes:
        loss: the storage of the loss; like the gradients, it is alive at the end of the step.
        gradients: the storages of each parameter with a gradient and of its gradient.
        outputs: with an external loss, the storages of the model's other outputs.
        name: the display name of the model ("ResNet-152"), or ""; it is not part of the fingerprint.
    """

    ops: tuple[Op, ...]
    storages: tuple[Storage, ...]
    loss: str
    gradients: tuple[tuple[str, str], ...]
    environment: Environment
    outputs: tuple[str, ...] = ()
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def title(self) -> str:
        """The name of the model in titles and tables: its display name, or its class."""
        return self.name or self.environment.model

    def op(self, name: str) -> Op:
        """The op called `name`."""
        return self.ops[self.rank[name]]

    @cached_property
    def rank(self) -> Mapping[str, int]:
        """The position of each op, by name."""
        return {op.name: position for position, op in enumerate(self.ops)}

    @cached_property
    def storage(self) -> Mapping[str, Storage]:
        """Each storage, by name."""
        return {storage.name: storage for storage in self.storages}

    @cached_property
    def maker(self) -> Mapping[str, str]:
        """The op that makes each storage; static memory has none."""
        return {name: op.name for op in self.ops for name in op.outputs}

    @cached_property
    def users(self) -> Mapping[str, tuple[int, ...]]:
        """The ranks of the ops that read or write each storage, ascending."""
        ranks_of: dict[str, list[int]] = {storage.name: [] for storage in self.storages}
        for rank, op in enumerate(self.ops):
            for name in dict.fromkeys(op.inputs + op.mutates):
                ranks_of[name].append(rank)
        return {name: tuple(ranks) for name, ranks in ranks_of.items()}

    @cached_property
    def kept(self) -> frozenset[str]:
        """Storages made by the step that are alive at its end."""
        return frozenset({self.loss, *self.outputs, *(gradient for _, gradient in self.gradients)})

    @cached_property
    def static_bytes(self) -> int:
        """Static memory, which exists before the step and stays: parameters, buffers, inputs, optimizer state."""
        return sum(storage.bytes for storage in self.storages if storage.name not in self.maker)

    @cached_property
    def lifetimes(self) -> Mapping[str, tuple[int, int]]:
        """The live range of each storage in the captured step: the ranks of the first and the last op of its life."""
        end = len(self.ops) - 1
        ranges = {storage.name: (0, end) for storage in self.storages}
        for name, maker in self.maker.items():
            first = self.rank[maker]
            ranges[name] = (first, end if name in self.kept else max(self.users[name], default=first))
        for rank, op in enumerate(self.ops):
            for name in op.holds:
                ranges[name] = (ranges[name][0], max(ranges[name][1], rank))
        return ranges

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """The bytes of the storages that are alive while each op of the captured step runs."""
        changes = [0] * (len(self.ops) + 1)
        for name, (first, last) in self.lifetimes.items():
            changes[first] += self.storage[name].bytes
            changes[last + 1] -= self.storage[name].bytes
        return tuple(accumulate(changes[:-1]))

    @cached_property
    def surviving(self) -> frozenset[str]:
        """Storages available in the backward phase without recomputation."""
        roles = (Role.ACTIVATION, Role.BUFFER)
        return frozenset(
            storage.name
            for storage in self.storages
            if storage.name not in self.maker or storage.role in roles or storage.name in self.kept
        )

    def recomputation(self, name: str) -> tuple[str, ...]:
        """The forward ops that recompute storage `name` from the other surviving storages, in order."""
        ops: set[str] = set()
        pending = [self.maker[name]]
        while pending:
            op = self.op(pending.pop())
            if op.name not in ops:
                ops.add(op.name)
                lost = set(op.inputs) - self.surviving
                pending += [need for need in op.needs if self._result(need) & lost]
        return tuple(sorted(ops, key=self.rank.__getitem__))

    def _result(self, name: str) -> set[str]:
        """The storages that an op's result lives in."""
        op = self.op(name)
        return set(op.outputs or op.mutates or op.inputs)

    @cached_property
    def activations(self) -> tuple[Activation, ...]:
        """Every activation, in order of creation."""
        return tuple(self._activation(storage) for storage in self.storages if storage.role is Role.ACTIVATION)

    @cached_property
    def bytes_by_role(self) -> Mapping[Role, int]:
        """The sum of the sizes of all storages of each role (they are not all alive at the same time)."""
        totals: Counter[Role] = Counter()
        for storage in self.storages:
            totals[storage.role] += storage.bytes
        return {role: totals[role] for role in Role}

    def _activation(self, storage: Storage) -> Activation:
        op = self.op(self.maker[storage.name])
        users = self.users[storage.name]
        forward = [rank for rank in users if self.ops[rank].phase is Phase.FORWARD]
        backward = [rank for rank in users if self.ops[rank].phase is Phase.BACKWARD]
        creation = self.rank[op.name]
        return Activation(
            name=storage.name,
            bytes=storage.bytes,
            op=op.name,
            module=op.module,
            creation_rank=creation,
            last_forward_rank=max(forward, default=creation),
            first_backward_rank=backward[0],
            last_backward_rank=backward[-1],
        )

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the graph's content, without its name: equal graphs have equal fingerprints."""
        content = {key: value for key, value in self.content().items() if key != "name"}
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]

    def content(self) -> dict[str, Any]:
        """The graph as plain lists and dicts, for a file.

        Keys and their order are part of the fingerprint of every saved result: they stay, whatever a field is called.
        """
        return {
            "ops": [_op_content(op) for op in self.ops],
            "storages": [{"name": item.name, "bytes": item.bytes, "role": item.role} for item in self.storages],
            "loss": self.loss,
            "gradients": self.gradients,
            "environment": {
                "torch": self.environment.torch,
                "device": self.environment.device,
                "model": self.environment.model,
                "optimizer": self.environment.optimizer,
                "dtype": self.environment.dtype,
                "batch": self.environment.batch,
                "random_state_bytes": self.environment.random_state_bytes,
            },
            "outputs": self.outputs,
            "name": self.name,
        }

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "StepGraph":
        """The graph that `content` came from."""
        environment = content["environment"]
        graph = cls(
            ops=tuple(_op(fields) for fields in content["ops"]),
            storages=tuple(Storage(item["name"], item["bytes"], Role(item["role"])) for item in content["storages"]),
            loss=content["loss"],
            gradients=tuple((parameter, gradient) for parameter, gradient in content["gradients"]),
            environment=Environment(**{**environment, "batch": tuple(environment["batch"])}),
            outputs=tuple(content["outputs"]),
            name=content.get("name", ""),  # which older files do not have
        )
        check_fields(graph)
        return graph

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the graph as JSON; the file appears whole or not at all."""
        files.write_saved(path, "StepGraph", self.content())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "StepGraph":
        """Read a graph that `save` wrote; it equals the one that was saved."""
        with files.open_saved(path, "StepGraph") as content:
            return cls.of(content)

    def __repr__(self) -> str:
        return self.report("StepGraph")

    def report(self, heading: str) -> str:
        """The graph in a few lines: batch, ops, activations, bytes by role."""
        environment = self.environment
        count = Counter(op.phase for op in self.ops)
        held = sum(activation.bytes for activation in self.activations)
        lines = [
            f"{heading}: {self.title}, {environment.optimizer}, {environment.device}, torch {environment.torch}",
            *(f"  {text}" for text in environment.batch),
            "  ops         " + ", ".join(f"{count[phase]:,} {phase}" for phase in Phase),
            f"  activations {len(self.activations):,} storages, {format_bytes(held)} held from forward to backward",
            "  bytes by role, summed over the step",
            *(f"    {role:<16}{format_bytes(size):>14}" for role, size in self.bytes_by_role.items()),
        ]
        return "\n".join(lines)


def _op_content(op: Op) -> dict[str, Any]:
    """An op as a file and the fingerprint have it; see `StepGraph.content`."""
    return {
        "name": op.name,
        "target": op.target,
        "phase": op.phase,
        "module": op.module,
        "needs": op.needs,
        "inputs": op.inputs,
        "outputs": op.outputs,
        "mutates": op.mutates,
        "holds": op.holds,
        "random": op.random,
        "view": op.view,
        "shortcut": op.rule_inputs,
        "recomputes": op.recomputes,
        "once": op.once,
    }


def _op(content: dict[str, Any]) -> Op:
    listed: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in content.items()
        if key not in ("phase", "shortcut")
    }
    return Op(**listed, phase=Phase(content["phase"]), rule_inputs=tuple(content["shortcut"]))


def _check(graph: StepGraph) -> None:
    """Refuse an inconsistent graph: with a name given twice, used before it is made, or unknown."""
    _refuse_duplicates("op", (op.name for op in graph.ops))
    _refuse_duplicates("storage", (storage.name for storage in graph.storages))
    made = {name for op in graph.ops for name in op.outputs}
    alive = {storage.name for storage in graph.storages} - made
    done: set[str] = set()
    order = list(Phase)
    phase = Phase.FORWARD
    for op in graph.ops:
        for name in op.inputs + op.mutates + op.holds:
            if name not in alive:
                raise AcwbError(f"Op {op.name} uses storage {name}, which no earlier op makes.")
        for name in op.needs:
            if name not in done:
                raise AcwbError(f"Op {op.name} needs op {name}, which does not run before it.")
        if order.index(op.phase) < order.index(phase):
            raise AcwbError(f"Op {op.name} of the {op.phase} phase comes after the {phase} phase.")
        if not graph.storage.keys() >= set(op.outputs) or alive & set(op.outputs):
            raise AcwbError(f"Op {op.name} makes storages {op.outputs}, which are unknown or already made.")
        phase = op.phase
        done.add(op.name)
        alive.update(op.outputs)
        if not {*op.inputs, *op.outputs[1:]} >= set(op.rule_inputs):
            raise AcwbError(
                f"The recompute rule of op {op.name} reads {op.rule_inputs}, which it neither reads nor makes."
            )
    read_backward = {name for op in graph.ops if op.phase is Phase.BACKWARD for name in op.inputs}
    for storage in graph.storages:
        if storage.role is Role.ACTIVATION and storage.name not in made & read_backward:
            raise AcwbError(f"Storage {storage.name} is an activation, but no backward op reads it.")
    for name in (graph.loss, *graph.outputs, *(name for pair in graph.gradients for name in pair)):
        if name not in alive:
            raise AcwbError(f"Storage {name} is the loss or a gradient, but the graph does not have it.")


def _refuse_duplicates(kind: str, names: Iterable[str]) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise AcwbError(f"The {kind} name {name!r} is given {times} times: every {kind} has one name of its own.")

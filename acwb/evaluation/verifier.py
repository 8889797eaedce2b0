"""Verifies that a step is bitwise equal to eager: `verify(step)`.

Each iteration runs twice from one state, by the step and by an eager loop, and everything that the two leave behind is
compared byte by byte. The next iteration goes on from eager's state. At the end all is restored.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm

if TYPE_CHECKING:
    import pandas
from acwb import bitwise, rng
from acwb._torch import pytree
from acwb.capture.step import TracedStep
from acwb.errors import AcwbError, check_count
from acwb.files import Saved
from acwb.rollback import defer_signals
from acwb.subject import Step, Subject

LOSS, GRADIENT, PARAMETER, BUFFER = "loss", "gradient", "parameter", "buffer"
STATE, RANDOM, INPUT = "optimizer state", "random state", "batch"
KINDS = (LOSS, GRADIENT, PARAMETER, BUFFER, STATE, RANDOM, INPUT)
MAX_SHOWN = 5

SnapshotKey = tuple[str, str]  # kind, and which of them
Snapshot = dict[SnapshotKey, torch.Tensor | None]


@dataclass(frozen=True)
class Difference:
    """A tensor that a step leaves behind and that differs from eager's.

    Attributes:
        iteration: counted from 1.
        kind: what it is: a gradient, a buffer, the random state.
        name: which one.
        differing: how many of its values are not bitwise equal.
        values: how many it has.
        relative_error: the norm of the difference over the norm of eager's; None where it is undefined.
    """

    iteration: int
    kind: str
    name: str
    differing: int
    values: int
    relative_error: float | None

    def __str__(self) -> str:
        how = f", relative error {self.relative_error:.2g}" if self.relative_error is not None else ""
        what = " ".join(part for part in (self.kind, self.name) if part)
        return f"iteration {self.iteration}: {what}: {self.differing:,} of {self.values:,} values differ{how}"


@dataclass(frozen=True, repr=False)
class Verification(Saved):
    """Bitwise comparison of a step with eager; true if nothing differs.

    Attributes:
        subject: what was trained.
        counts: how many tensors of each kind were compared in each iteration.
        gradient_error: the norm of the difference of all gradients together over the norm of eager's, in the
            worst iteration. A single gradient that is zero but for rounding (that of a key's bias) says nothing.
    """

    KIND = "Verification"

    subject: str
    iterations: int
    counts: Mapping[str, int]
    differences: tuple[Difference, ...]
    gradient_error: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether all compared tensors are bitwise equal to eager's."""
        return not self.differences

    def __bool__(self) -> bool:
        return self.equal

    def of_kind(self, kind: str) -> tuple[Difference, ...]:
        """The differences of one kind of tensor: gradients, buffers, optimizer state."""
        return tuple(each for each in self.differences if each.kind == kind)

    @property
    def frame(self) -> "pandas.DataFrame":
        """One row for each kind: how many were compared, and how many of them differ."""
        import pandas

        differing = Counter(each.kind for each in {(each.kind, each.name): each for each in self.differences}.values())
        rows = [(kind, count, differing[kind]) for kind, count in self.counts.items()]
        return pandas.DataFrame(rows, columns=["kind", "compared", "differing"])

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Verification":
        """Read a verification from the JSON content of its file."""
        differences = tuple(Difference(**each) for each in content["differences"])
        known = {name: content[name] for name in ("subject", "iterations", "counts", "gradient_error")}
        return cls(**known, differences=differences)

    def __repr__(self) -> str:
        title = "bitwise equal to eager" if self.equal else "NOT equal to eager"
        lines = [f"Verification: {self.subject}, {self.iterations} iterations: {title}"]
        for row in self.frame.itertuples():
            verdict = "equal" if row.differing == 0 else f"{row.differing:,} differ"
            lines.append(f"  {row.kind:<16}{row.compared:>7,}  {verdict}")
        lines += [f"  {each}" for each in self.differences[:MAX_SHOWN]]
        if len(self.differences) > MAX_SHOWN:
            lines.append(f"  and {len(self.differences) - MAX_SHOWN:,} more, in .differences")
        return "\n".join(lines)


def verify(step: TracedStep, iterations: int = 3) -> Verification:
    """Compare a captured or planned step with eager, bitwise; the model is left as it was.

    Loss, every gradient, parameter and buffer, the optimizer's state, the random state and the batch are compared after
    each iteration. It takes memory for two more copies of all that.

    Example:
        >>> assert acwb.verify(planned)
    """
    if not isinstance(step, TracedStep):
        raise AcwbError(f"verify takes a step as acwb.trace or acwb.rewrite gives it, not {type(step).__name__}.")
    check_count("iterations", iterations)
    return compare(step.subject, step.run, iterations)


def compare(subject: Subject, step: Step, iterations: int = 1) -> Verification:
    """Compare any step that trains the subject's own tensors with eager, bitwise."""
    differences: list[Difference] = []
    counts: Counter[str] = Counter()
    error = 0.0
    with defer_signals() as signals, _restored(subject), signals.admit():
        for iteration in tqdm(range(1, iterations + 1), desc="verifying", leave=False):
            with defer_signals() as inner, _restored(subject), inner.admit():
                ours = {name: _copy(value) for name, value in _snapshot(subject, step).items()}
            theirs = _snapshot(subject, subject.eager_step)
            counts = Counter(kind for kind, _ in theirs)
            for kind, name in theirs | ours:
                mine, plain = ours.get((kind, name)), theirs.get((kind, name))
                if not _same(mine, plain):
                    differences.append(Difference(iteration, kind, name, *_extent(mine, plain)))
            if any((each.iteration, each.kind) == (iteration, GRADIENT) for each in differences):
                error = max(error, _gradient_error(ours, theirs))
    differences.sort(key=lambda each: (each.iteration, KINDS.index(each.kind)))
    compared = {kind: counts[kind] for kind in KINDS if counts[kind]}
    return Verification(subject.name, iterations, compared, (*differences,), error)


def _gradient_error(ours: Snapshot, theirs: Snapshot) -> float:
    """The norm of the difference of all gradients over the norm of eager's; a missing one counts as zero."""
    difference = size = 0.0
    for kind, name in theirs | ours:
        if kind == GRADIENT:
            mine, plain = ours.get((kind, name)), theirs.get((kind, name))
            known = [each.double() for each in (mine, plain) if each is not None]
            difference += float((known[0] - known[1] if len(known) == 2 else known[0]).norm() ** 2)
            size += float(plain.double().norm() ** 2) if plain is not None else 0.0
    return (difference / size) ** 0.5 if size > 0 else float("inf")


def _snapshot(subject: Subject, step: Callable[[], torch.Tensor]) -> Snapshot:
    """Every tensor that an iteration leaves behind, by kind and name."""
    found: Snapshot = {(LOSS, ""): step()}
    names = {id(parameter): name for name, parameter in subject.model.named_parameters()}
    for name, parameter in subject.model.named_parameters():
        found[PARAMETER, name] = parameter.detach()
        if parameter.grad is not None:
            found[GRADIENT, name] = parameter.grad
    for name, buffer in subject.model.named_buffers():
        found[BUFFER, name] = buffer
    if subject.optimizer is not None:
        for owner, values in subject.optimizer.state.items():
            for key, value in values.items():
                found[STATE, f"{key} of {names.get(id(owner), 'a parameter')}"] = _as_tensor(value)
    found[RANDOM, ""] = rng.get_state(subject.device)
    for path, leaf in pytree.tree_leaves_with_path(subject.batch):
        if isinstance(leaf, torch.Tensor):
            found[INPUT, pytree.keystr(path)] = leaf
    return found


def _as_tensor(value: object) -> torch.Tensor | None:
    return value if isinstance(value, torch.Tensor) or value is None else torch.tensor(value)


def _copy(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


@contextmanager
def _restored(subject: Subject) -> Iterator[None]:
    """At the end, parameters, buffers, batch, optimizer, gradients and random state are as they were."""
    values = [(tensor, tensor.detach().clone()) for tensor in {id(each): each for each in subject.tensors}.values()]
    gradients = [(parameter, parameter.grad) for parameter in subject.model.parameters()]
    optimizer, device = subject.optimizer, subject.device
    state = {key: dict(each) for key, each in optimizer.state.items()} if optimizer is not None else {}
    random_state = rng.get_state(device)
    try:
        yield
    finally:
        if optimizer is not None:
            optimizer.state.clear()
            optimizer.state.update(state)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        rng.set_state(device, random_state)


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    return left is right if left is None or right is None else bitwise.equal(left, right)


def _extent(ours: torch.Tensor | None, plain: torch.Tensor | None) -> tuple[int, int, float | None]:
    """How many values differ, of how many, and the relative error; without a counterpart of this spec, all differ."""
    if ours is None or plain is None or ours.shape != plain.shape or ours.dtype != plain.dtype:
        values = max(each.numel() for each in (ours, plain) if each is not None)
        return values, values, None
    differing = int(bitwise.differing(ours, plain).sum())
    if not plain.is_floating_point():
        return differing, plain.numel(), None
    difference, size = (ours.double() - plain.double()).norm(), plain.double().norm()
    return differing, plain.numel(), float(difference / size) if size > 0 else None

"""The storages of a captured graph are those of a real run: same aliases, same sizes, made by the same ops."""

import operator
from typing import Any

import pytest
import torch
from torch import fx

import acwb
from acwb.subject import Subject
from support.tiny_models import MAKERS

# The kernel of the LSTM's backward makes the bias's gradient twice; torch describes the two as one storage.
MISDESCRIBED = {"recurrent"}


class Audit(fx.Interpreter):
    """Runs forward and backward on real tensors and checks each op's storages against the graph."""

    def __init__(self, step: acwb.TracedStep) -> None:
        super().__init__(step._compute, garbage_collect_values=False)  # an address means a storage only while it lives
        self.graph_ = step.graph
        self.names: dict[int, str] = {}
        self.seen: list[str] = []

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if node.op == "placeholder":
            self.names.setdefault(result.untyped_storage()._cdata, node.meta["storage"])
        elif node.op == "get_attr":
            self.names.setdefault(result.untyped_storage()._cdata, node.name)
        elif node.op == "call_function" and node.target is not operator.getitem:
            self._audit(self.graph_.ops[self.graph_.rank[node.name]], result)
        return result

    def _audit(self, op: acwb.Op, result: Any) -> None:
        made = []
        for position, tensor in enumerate(result if isinstance(result, (tuple, list)) else [result]):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self.names:
                assert self.names[storage._cdata] in op.inputs, f"{op.name} gives an alias of what it does not read"
            else:
                name = f"{op.name}:{position}" if isinstance(result, (tuple, list)) else op.name
                made.append(name)
                self.names[storage._cdata] = name
                assert self.graph_.storage[name].bytes == storage.nbytes(), name
        assert tuple(made) == op.outputs, op.name
        self.seen.append(op.name)


def audit(subject: Subject) -> acwb.TracedStep:
    step = acwb.trace(subject)
    auditor = Audit(step)
    with torch._C._AutoDispatchBelowAutograd():
        auditor.run(*step.inputs())
    computed = [op.name for op in step.graph.ops if op.phase is not acwb.Phase.OPTIMIZER and not op.mutates]
    assert auditor.seen == computed
    return step


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - MISDESCRIBED))
def test_storages_of_tiny_models_are_those_of_a_real_run(name: str) -> None:
    audit(MAKERS[name]())


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_bert", "tiny_encoder"])
def test_storages_of_tiny_subjects_are_those_of_a_real_run(name: str) -> None:
    audit(getattr(acwb.models, name)())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet152", "bert", "encoder"])
def test_storages_of_real_subjects_are_those_of_a_real_run(name: str) -> None:
    audit(getattr(acwb.models, name)(batch_size=1))


def test_roles_phases_and_module_paths_of_a_small_network() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = acwb.trace(model, (torch.randn(5, 4),), lambda model, batch: model(*batch).sum(), optimizer)
    by_role: dict[str, list[str]] = {}
    for storage in step.graph.storages:
        by_role.setdefault(storage.role, []).append(storage.name)
    assert by_role["parameter"] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert by_role["buffer"][:3] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert by_role["input"] == ["batch[0]"]
    assert by_role["optimizer state"] == [f"{name}:momentum_buffer" for name in by_role["parameter"]]
    assert dict(step.graph.gradients).keys() == set(by_role["parameter"])
    assert sorted(dict(step.graph.gradients).values()) == sorted(by_role["gradient"])
    normalization = "_native_batch_norm_legit_functional"
    assert by_role["activation"] == ["addmm", f"{normalization}:1", f"{normalization}:2", "relu"]
    paths = {op.name: op.module for op in step.graph.ops}
    assert (paths["addmm"], paths[normalization], paths["relu"]) == ("0", "1", "2")
    assert (paths["threshold_backward"], paths["native_batch_norm_backward"]) == ("2", "1")
    assert [op.phase for op in step.graph.ops] == sorted(
        (op.phase for op in step.graph.ops), key=list(acwb.Phase).index
    )


def test_random_and_view_ops_are_marked() -> None:
    step = audit(acwb.models.tiny_bert())
    random = {op.target for op in step.graph.ops if op.random}
    assert random == {"aten.native_dropout.default"}
    views = [op for op in step.graph.ops if op.view]
    assert {"aten.view.default", "aten.t.default"} <= {op.target for op in views}
    assert all(not op.outputs and not op.mutates for op in views)

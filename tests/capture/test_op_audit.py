"""Every op of ATen has the memory behind its results that a captured step says it has."""

import pytest
import torch

from acwb.capture.eager_parity import as_in_eager
from support.op_audit import audit, audit_layers, predicted

# Where arguments have different layouts, torch describes the results of these in another one than the kernel gives, and
# no rule corrects it: rare in training, or (the LSTM's workspace) read by its own backward only.
LAYOUTS_NOT_KNOWN = {
    "aten._embedding_bag.default",  # its offsets
    "aten.channel_shuffle.default",
    "aten.log_sigmoid_forward.default",  # its second result, which only its backward reads
    "aten.max_unpool2d.default",
    "aten.mkldnn_rnn_layer.default",
    "aten.native_layer_norm_backward.default",  # the gradient of a weight of several dimensions
    "aten.normal.Tensor_Tensor",
    "aten.pow.Scalar",
    "aten.reflection_pad3d.default",
    "aten.reflection_pad3d_backward.default",
    "aten.replication_pad3d.default",
    "aten.replication_pad3d_backward.default",
}


def test_layers_allocate_what_is_predicted() -> None:
    found = audit_layers()
    assert found.wrong == {}
    assert found.strided.keys() <= LAYOUTS_NOT_KNOWN
    assert {"aten.col2im.default", "aten.im2col.default", "aten.mkldnn_rnn_layer.default"} <= found.seen


@pytest.mark.parametrize("shape", [(2, 2), (3, 4), (2, 3, 4)])
@pytest.mark.parametrize(
    "op", ["mul", "add", "div", "gelu_backward", "silu_backward", "sigmoid_backward", "threshold_backward"]
)
def test_a_pointwise_op_on_an_expanded_and_a_permuted_tensor_has_the_layout_of_its_kernel(
    op: str, shape: tuple[int, ...]
) -> None:
    kernel = getattr(torch.ops.aten, op)
    kernel = kernel.Tensor if "Tensor" in kernel.overloads() else kernel.default
    expanded = torch.ones(()).expand(shape)
    permuted = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    for pair in ((expanded, permuted), (permuted, expanded)):
        arguments = (*pair, 0) if op == "threshold_backward" else pair
        with as_in_eager():
            _, (described,) = predicted(kernel, arguments, {})
        assert described.stride() == kernel(*arguments).stride()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_every_op_allocates_what_is_predicted(dtype: torch.dtype) -> None:
    found = audit(dtype)
    assert found.wrong == {}
    assert found.strided.keys() <= LAYOUTS_NOT_KNOWN
    assert len(found.seen) > 200

"""Workspaces without a run: every kernel is asked for its own, and answers as it does in the step."""

from collections.abc import Callable

import pytest
import torch

import acwb
from acwb.core.graph import Phase
from acwb.profiling.workspace_probe import probe_workspaces
from acwb.subject import Subject
from support.bitwise import differences, snapshot


@pytest.mark.parametrize("make", [acwb.models.tiny_resnet, acwb.models.tiny_bert, acwb.models.resnet18])
def test_workspaces_are_those_of_a_profile_and_nothing_changes(make: Callable[..., Subject]) -> None:
    subject = make(batch_size=5)
    step = acwb.trace(subject)
    profile = acwb.profile(step, repeats=1)
    before = snapshot(subject, torch.zeros(()))
    own, short = probe_workspaces(step)
    ranked = {op.name for op in step.graph.ops if op.phase is not Phase.OPTIMIZER}
    assert own == {name: size for name, size in profile.workspace_bytes.items() if name in ranked}
    assert any(own.values())
    assert {name: short[name] for name in profile.rules} == {name: size for name, (_, size) in profile.rules.items()}
    assert differences([snapshot(subject, torch.zeros(()))], [before]) == []

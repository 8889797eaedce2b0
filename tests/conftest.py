"""Settings for all tests, and a tiny step that several files look at."""

import pytest
from hypothesis import settings

import acwb

settings.register_profile("acwb", deadline=None)  # the machine is shared: a slow example says nothing
settings.load_profile("acwb")


@pytest.fixture(scope="module")
def step() -> acwb.TracedStep:
    subject = acwb.models.tiny_bert(batch_size=32)
    return acwb.trace(subject)


@pytest.fixture(scope="module")
def profile(step: acwb.TracedStep) -> acwb.Profile:
    return acwb.profile(step, repeats=1)

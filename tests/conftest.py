"""Settings for all tests, and a tiny step that several files look at."""

import pytest
from hypothesis import settings

import acwb

settings.register_profile("acwb", deadline=None)  # the machine is shared: a slow example says nothing
settings.load_profile("acwb")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests run two at a time, but those on real models one by one: two with snapshots need too much memory."""
    for item in items:
        is_real = any(name in item.nodeid for name in ("[resnet152", "[bert", "[encoder"))
        if is_real and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group("real models"))


@pytest.fixture(scope="module")
def step() -> acwb.TracedStep:
    subject = acwb.models.tiny_bert(batch_size=32)
    return acwb.trace(subject)


@pytest.fixture(scope="module")
def profile(step: acwb.TracedStep) -> acwb.Profile:
    return acwb.profile(step, repeats=1)

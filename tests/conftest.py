"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("acwb", deadline=None)  # the machine is shared: a slow example says nothing
settings.load_profile("acwb")

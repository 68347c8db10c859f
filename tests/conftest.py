"""Settings of all tests."""

from hypothesis import settings

# A busy machine makes single examples slow at random; the time limit of a whole test stays.
settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")

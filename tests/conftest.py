"""Settings of all tests."""

import gc

from hypothesis import settings

# A busy machine makes single examples slow at random; the time limit of a whole test stays.
settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")


def pytest_collection_finish() -> None:
    """What the imports made stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()

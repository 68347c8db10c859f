"""Settings of all tests."""

import atexit
import gc
import os
import shutil
import tempfile

from hypothesis import settings

# A busy machine makes single examples slow at random; the time limit of a whole test stays.
settings.register_profile("offbeat", deadline=None)
settings.load_profile("offbeat")


def pytest_collection_finish() -> None:
    """What the imports made stays: the garbage collector need not look through it again and again."""
    gc.collect()
    gc.freeze()


def pytest_configure() -> None:
    """Tests that run beside each other do not see each other's temporary files."""
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        folder = tempfile.mkdtemp(prefix=f"{worker}-")
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)

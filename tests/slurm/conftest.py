import tempfile
from pathlib import Path

import pytest
from virtual_cluster import VirtualCluster, unavailable


@pytest.fixture(scope="session")
def cluster():
    """Two virtual nodes with 8 CPUs and no GPU each."""
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="t1-slurm-") as directory:  # short: socket paths have a length limit
        virtual = VirtualCluster(Path(directory), nodes=2, gpus=0)
        try:
            virtual.start()
            yield virtual
        finally:
            virtual.stop()

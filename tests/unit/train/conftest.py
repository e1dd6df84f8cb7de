import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    from tiny import write_data

    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder

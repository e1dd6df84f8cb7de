import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tiny products gain nothing from threads and lose much to their hand-over on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

import threading

import pytest
import torch

from tune_model.runtime.execution.autograd import without_autograd


def test_nothing_is_recorded_and_the_state_comes_back():
    w = torch.ones(3, requires_grad=True)
    with without_autograd():
        out = (w * 2).view(3, 1)
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(torch.is_grad_enabled()))
        thread.start()
        thread.join()
    assert seen == [True]
    assert not out.requires_grad
    assert (w * 2).requires_grad
    (out.squeeze(1) * w).sum().backward()
    assert torch.equal(w.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("enabled", [True, False])
def test_it_nests_and_survives_errors(enabled: bool):
    class StopError(Exception):
        pass

    with torch.set_grad_enabled(enabled):
        with pytest.raises(StopError), without_autograd(), without_autograd():
            raise StopError
        assert torch.is_grad_enabled() == enabled
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad == enabled


def test_writes_through_views_reach_their_base():
    cache = torch.zeros(4, 3)
    with without_autograd():
        cache[1:3].transpose(0, 1).add_(1.0)
    assert cache.sum().item() == 6.0

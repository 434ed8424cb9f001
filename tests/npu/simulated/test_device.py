"""The simulated device does what the tests on it rely on."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.npu.simulated.inputs import fetch, normal, send
from tests.support.fake_npu_memory import MEMORY


def test_tensors_are_plain_and_their_views_share_memory_with_real_strides():
    x = normal(4, 6).to("npu")
    view = x.t()[1:, ::2]
    assert type(x) is torch.Tensor
    assert x.device == torch.device("npu", 0)
    assert (view.stride(), view.storage_offset(), view.is_contiguous()) == ((1, 12), 1, False)
    view.fill_(7.0)
    torch.testing.assert_close(x.cpu()[::2, 1:], torch.full((2, 5), 7.0), rtol=0, atol=0)


def test_in_place_results_and_out_arguments_keep_their_tensor():
    x, out = normal(3, 4).to("npu"), torch.empty(0, device="npu")
    assert torch.add(x, x, out=out) is out
    torch.testing.assert_close(out.cpu(), 2 * x.cpu(), rtol=0, atol=0)
    assert out.t_().shape == (4, 3)
    assert out.resize_(2, 2).cpu().shape == (2, 2)


def test_a_training_step_equals_the_one_on_the_cpu():
    def step(device):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for seed in range(3):
            optimizer.zero_grad()
            model(normal(5, 8, seed=seed).to(device)).pow(2).sum().backward()
            optimizer.step()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.testing.assert_close(step("npu"), step("cpu"), rtol=0, atol=0)


def test_tensors_of_two_devices_are_refused_as_on_a_real_one():
    with pytest.raises(RuntimeError, match="same device"):
        normal(3).to("npu") + normal(3)


def test_memory_is_given_back_with_the_last_tensor_on_it():
    gc.collect()
    before = MEMORY.allocated
    x = normal(1000).to("npu")
    view = x[10:20]
    del x
    assert MEMORY.allocated == before + 4000
    del view
    assert MEMORY.allocated == before


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: torch.empty(3).copy_(x),
        lambda x: torch.npu.synchronize(),
    ],
)
def test_everything_that_makes_the_host_wait_can_be_refused(npu, wait):
    x = normal(3).to("npu")
    with npu.asynchronous(), pytest.raises(RuntimeError, match="synchronises"):
        wait(x)
    with npu.asynchronous():
        x.exp().sum()


def test_a_graph_computes_again_on_the_same_memory():
    x = send(normal(4))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        y = (x * 2).exp().view(2, 2).t()
        y.add_(1)
    for seed in (1, 2):
        x.copy_(normal(4, seed=seed).to("npu"))
        graph.replay()
        expected = (normal(4, seed=seed) * 2).exp().view(2, 2).t() + 1
        torch.testing.assert_close(fetch(y), expected, rtol=0, atol=0)


def test_capture_refuses_what_waits():
    x = normal(3).to("npu")
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(RuntimeError, match="synchronises"):
        x.sum().item()


def test_a_stream_of_ones_own_can_be_refused(npu):
    assert torch.npu.current_stream() is torch.npu.current_stream()
    with npu.asynchronous(), pytest.raises(RuntimeError, match="stream"):
        torch.npu.Stream()

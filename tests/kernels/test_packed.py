"""The torch twin of products with quantised weights."""

import torch
import torch.nn.functional as F

from infinilm.kernels.packed import packed_linear, quantize_activations


def test_blocks_are_rounded_to_their_own_scale() -> None:
    x = torch.zeros(2, 320)  # a block of 256 columns, and one of 64
    x[0, :4] = torch.tensor([32512.0, -2.5, 3.5, 0.4])
    x[0, 256:258] = torch.tensor([-0.5, 0.25])
    quants, scales = quantize_activations(x)
    assert quants.dtype == torch.int16
    assert quants[0, :4].tolist() == [32512, -2, 4, 0]  # halves to even
    assert quants[0, 256:258].tolist() == [-32512, 16256]
    assert scales.equal(torch.tensor([[1.0, 0.5 / 32512], [0.0, 0.0]]))
    assert not quants[1].any()


def test_the_product_is_that_of_the_rounded_activations() -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(5, 512), torch.randn(7, 512), torch.randn(7)
    quants, scales = quantize_activations(x)
    rounded = quants.float() * scales.repeat_interleave(256, dim=1)
    assert (rounded - x).abs().max() <= scales.max() / 2 * 1.001
    torch.testing.assert_close(packed_linear(x, weight), F.linear(rounded, weight))
    torch.testing.assert_close(packed_linear(x, weight, bias), F.linear(rounded, weight, bias))
    exact = F.linear(x, weight)
    assert 1e-6 < (packed_linear(x, weight) - exact).std() / exact.std() < 3e-5

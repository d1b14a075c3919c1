"""Quantising while reading: as good as the gguf package's, or better."""

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize

from infinilm.errors import InvalidValueError
from infinilm.loading.quantize import quantize as quantize_arrays


def quantize_ours(values: torch.Tensor, format: str) -> torch.Tensor:
    return torch.from_numpy(quantize_arrays(values.numpy(), format))


def values_of(blocks: torch.Tensor, format: str) -> torch.Tensor:
    return torch.from_numpy(dequantize(blocks.numpy(), GGMLQuantizationType[format]))


def theirs(values: torch.Tensor, format: str) -> torch.Tensor:
    return torch.from_numpy(quantize(values.numpy(), GGMLQuantizationType[format]))


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


SPREADS = {
    "normal": torch.randn(64, 256, generator=torch.Generator().manual_seed(0)),
    "tiny": 1e-3 * torch.randn(64, 256, generator=torch.Generator().manual_seed(1)),
    "far from zero": 5 + torch.rand(64, 256, generator=torch.Generator().manual_seed(2)),
    "outliers": torch.randn(64, 256, generator=torch.Generator().manual_seed(3)) ** 5,
}


@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
def test_no_further_from_the_values_than_the_reference(format: str, spread: str) -> None:
    values = SPREADS[spread]
    reference = theirs(values, format)
    ours = quantize_ours(values, format)
    assert ours.shape == reference.shape
    assert ours.dtype == torch.uint8
    error, their_error = (rms(values_of(blocks, format) - values) for blocks in (ours, reference))
    assert error <= their_error * (1.0001 if format == "Q8_0" else 0.99)


def test_four_bits_are_fitted_to_the_numbers() -> None:
    values = SPREADS["normal"]
    low, high = values.view(-1, 32).aminmax(dim=1, keepdim=True)
    scale = (high - low) / 15
    plain = ((values.view(-1, 32) - low) / scale).round() * scale + low
    fitted = values_of(quantize_ours(values, "Q4_1"), "Q4_1").view(-1, 32)
    errors = (fitted - values.view(-1, 32)).square().sum(1)
    plain_errors = (plain - values.view(-1, 32)).square().sum(1)
    assert errors.mean() < 0.95 * plain_errors.mean()


@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
def test_blocks_without_a_spread(format: str) -> None:
    values = torch.cat((torch.zeros(1, 32), torch.full((1, 32), 0.5), torch.full((1, 32), -2.0)))
    torch.testing.assert_close(values_of(quantize_ours(values, format), format), values, rtol=2**-12, atol=0)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
def test_what_is_no_number_stays_in_its_block(format: str) -> None:
    values = torch.ones(1, 96)
    values[0, 40] = torch.nan
    found = values_of(quantize_ours(values, format), format)
    assert found[0, :32].isfinite().all()
    assert found[0, 32:64].isnan().all()
    assert found[0, 64:].isfinite().all()


def test_what_can_not_be_quantised() -> None:
    with pytest.raises(InvalidValueError, match=r"format='Q4_K' can't be made of floats; use one of Q8_0, Q4_1"):
        quantize_ours(torch.zeros(1, 256), "Q4_K")
    with pytest.raises(InvalidValueError, match="rows of 48 numbers are not whole blocks of 32"):
        quantize_ours(torch.zeros(1, 48), "Q8_0")

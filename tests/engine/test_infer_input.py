"""`InferEngine`'s `Input`: what its fields take, share and refuse; and `Output`."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.lowlevel.infer_input import Input, Output


def test_defaults_of_an_input() -> None:
    given = Input()
    assert given.input_ids is given.position_ids is given.block_tables is given.past_kv_lengths is None
    assert (given.temperature, given.top_k, given.top_p, given.random_val) == (1.0, 50, 1.0, 0.1)
    assert (given.return_logits, given.return_hidden_states) == (False, False)


def test_fields_and_their_aliases_can_be_read_and_written() -> None:
    given = Input(input_ids=[[1, 2]], total_kv_lengths=[2], temperature=[0.5, 1.0])
    given.input_ids = [[3]]
    given.past_sequence_lengths = np.array([4])
    given.top_k = 1
    assert given.input_ids.tolist() == [[3]]
    assert given.cache_lengths is given.past_kv_lengths is given.past_sequence_lengths
    assert given.cache_lengths.tolist() == [4]
    assert given.input_lengths is given.total_kv_lengths is given.total_sequence_lengths
    assert (given.temperature, given.top_k) == ([0.5, 1.0], 1)
    given.cache_lengths = None
    assert given.past_kv_lengths is None
    with pytest.raises(AttributeError, match="top_q"):
        given.top_q = 1  # type: ignore[attr-defined]


def test_tensors_are_kept_and_arrays_shared() -> None:
    tensor, array = torch.tensor([[1, 2]], dtype=torch.int32), np.array([3, 0, 4, 0])
    given = Input(input_ids=tensor, cache_lengths=array, input_lengths=array[::2])
    assert given.input_ids is tensor
    assert given.cache_lengths.data_ptr() == given.input_lengths.data_ptr() == array.ctypes.data
    array[2] = 5
    assert given.input_lengths.tolist() == [3, 5]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.uint64])
def test_every_kind_of_integer_is_shared(dtype: Any) -> None:
    array = np.array([[1, 2], [3, 4]], dtype=dtype)
    given = Input(input_ids=array)
    assert given.input_ids.tolist() == array.tolist()
    assert given.input_ids.data_ptr() == array.ctypes.data


def test_arrays_that_torch_can_not_share_are_copied_without_a_warning() -> None:
    fixed = np.array([1, 2, 3])
    fixed.flags.writeable = False
    records = np.array([(1, 0), (2, 0), (3, 0)], dtype=[("id", "i4"), ("flag", "i1")])
    swapped = np.array([1, 2, 3], dtype=">i4")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in (fixed, np.array([3, 2, 1])[::-1], records["id"], swapped, range(1, 4), (1, 2, 3)):
            assert Input(input_ids=ids).input_ids.tolist() == [1, 2, 3]


def test_output_shares_memory_with_its_array() -> None:
    output = Output(torch.tensor([1, 2]))
    output.output_ids.numpy()[0] = 7
    assert output.output_ids.tolist() == [7, 2]
    assert output.logits is output.hidden_states is None


BAD_FIELDS = [
    ({"input_idx": [1]}, InvalidTypeError, "unknown keyword 'input_idx'; known are: input_ids, .*past_kv_lengths"),
    ({"cache_lengths": [1], "past_kv_lengths": [1]}, InvalidValueError, "cache_lengths was given twice.*past_kv"),
    ({"past_kv_lengths": [1], "past_sequence_lengths": [1]}, InvalidValueError, "cache_lengths was given twice"),
    ({"input_ids": [[1, 2], [3]]}, InvalidValueError, r"input_ids=\[\[1, 2\], \[3\]\].*equal length"),
    ({"input_ids": [1.0, 2.0]}, InvalidTypeError, r"input_ids=\[1\.0, 2\.0\] holds float64; give integers"),
    ({"input_ids": ["a"]}, InvalidTypeError, "input_ids.*give integers"),
    ({"input_ids": "abc"}, InvalidTypeError, "input_ids='abc'"),
    ({"input_ids": [True]}, InvalidTypeError, "input_ids.*bool"),
    ({"input_ids": [2**70]}, InvalidTypeError, "input_ids.*give integers"),
    ({"input_ids": [1, None]}, InvalidTypeError, "input_ids.*None"),
    ({"input_ids": 5}, InvalidTypeError, "input_ids=5 must be a torch tensor, a NumPy array or a list"),
    ({"position_ids": np.ones(2)}, InvalidTypeError, r"position_ids.*float64"),
    ({"slot_mapping": torch.ones(2)}, InvalidTypeError, r"slot_mapping.*torch\.float32"),
    ({"block_tables": torch.ones(2, dtype=torch.bool)}, InvalidTypeError, r"block_tables.*torch\.bool"),
    ({"input_ids": torch.ones(2, dtype=torch.int64, device="meta")}, InvalidTypeError, "input_ids.*meta"),
    ({"input_ids": torch.ones(2, dtype=torch.int64).to_sparse()}, InvalidTypeError, "input_ids.*sparse"),
]


@pytest.mark.parametrize(("fields", "error", "message"), BAD_FIELDS, ids=lambda value: str(value)[:40])
def test_bad_fields_are_refused_when_set(fields: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Input(**fields)

"""What is packed for a captured step comes out on the device as it went in, and padding does nothing."""

import numpy as np
import torch

from infinilm.kernels.step_inputs import DecodeInputs, MixedInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MAX_BLOCKS = 700  # more than a kernel copies at a time
LAST_TOKEN = torch.arange(100, 120, device=DEVICE)  # row r drew 100 + r


def test_decoding_rows() -> None:
    inputs = DecodeInputs(8, MAX_BLOCKS, DEVICE).first(4)
    tables = np.arange(3 * 600).reshape(3, 600)
    context_lens = np.array([1, 33, 9600])
    packed = np.zeros(len(inputs.packed), dtype=np.int32)
    used = inputs.pack(packed, np.array([5, 0, 7]), context_lens, tables, num_shared=32)
    inputs.packed[:used] = torch.from_numpy(packed[:used])
    inputs.unpack(LAST_TOKEN, block_size=16)

    assert inputs.rows.tolist() == [5, 0, 7, -1]
    assert inputs.ids[:3].tolist() == [105, 100, 107]
    assert inputs.context_lens.tolist() == [1, 33, 9600, 0]
    assert inputs.positions.tolist() == [0, 32, 9599, 0]
    assert inputs.slots.tolist() == [0, 602 * 16, 1799 * 16 + 15, -1]
    assert inputs.num_shared.tolist() == [32]
    assert inputs.tables[:3, :600].tolist() == tables.tolist()


def test_prompts_beside_decoding_rows() -> None:
    inputs = MixedInputs(16, 4, MAX_BLOCKS, DEVICE)
    tables = np.arange(3 * 300).reshape(3, 300)
    packed = np.full(len(inputs.packed), 77, dtype=np.int32)
    used = inputs.pack(
        packed,
        ids=np.array([-1, 8, 9, 10, 6]),
        token_rows=np.array([3, 4, 4, 4, 1]),
        positions=np.array([20, 0, 1, 2, 40]),
        slots=np.array([1, 2, 3, 4, 5]),
        sample_rows=np.array([3, 1, 1]),
        sample_places=np.array([0, 3, 4]),
        sample_positions=np.array([21, 40, 41]),
        query_lens=np.array([1, 3, 1]),
        context_lens=np.array([21, 3, 41]),
        tables=tables,
        num_decoding=1,
    )
    inputs.packed[:used] = torch.from_numpy(packed[:used])
    inputs.unpack(LAST_TOKEN)

    assert inputs.ids.tolist() == [103, 8, 9, 10, 6] + [0] * 11
    assert inputs.positions.tolist() == [20, 0, 1, 2, 40] + [0] * 11
    assert inputs.slots.tolist() == [1, 2, 3, 4, 5] + [-1] * 11
    assert inputs.sample_rows.tolist() == [3, 1, 1, -1]
    assert inputs.sample_places.tolist() == [0, 3, 4, 0]
    assert inputs.sample_positions.tolist() == [21, 40, 41, 0]
    assert inputs.query_starts.tolist() == [0, 1, 4, 5, 5]
    assert inputs.decode_lens.tolist() == [21, 0, 0, 0]
    assert inputs.prefill_lens.tolist() == [0, 3, 41, 0]
    assert inputs.tables[:3, :300].tolist() == tables.tolist()


def test_cleared_inputs_are_padding() -> None:
    decode = DecodeInputs(8, MAX_BLOCKS, DEVICE)
    decode.packed.fill_(5)
    small = decode.first(4)
    small.clear()
    small.unpack(LAST_TOKEN, block_size=16)
    assert small.rows.tolist() == small.slots.tolist() == [-1] * 4
    assert small.context_lens.tolist() == [0] * 4

    mixed = MixedInputs(16, 4, MAX_BLOCKS, DEVICE)
    mixed.packed.fill_(5)
    mixed.clear()
    mixed.unpack(LAST_TOKEN)
    assert mixed.sample_rows.tolist() == [-1] * 4
    assert mixed.slots.tolist() == [-1] * 16
    assert mixed.decode_lens.tolist() == mixed.prefill_lens.tolist() == [0] * 4

"""The GGUF header parser, against files written by the `gguf` package and against liars."""

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from infinilm.errors import CheckpointError
from infinilm.loading.gguf import GGML_TYPES, GGUFFile


def write_sample(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_uint8("test.u8", 255)
    writer.add_int8("test.i8", -128)
    writer.add_uint16("test.u16", 65535)
    writer.add_int16("test.i16", -32768)
    writer.add_uint32("test.u32", 2**32 - 1)
    writer.add_int32("test.i32", -(2**31))
    writer.add_uint64("test.u64", 2**64 - 1)
    writer.add_int64("test.i64", -(2**63))
    writer.add_float32("test.f32", 0.1)
    writer.add_float64("test.f64", 0.1)
    writer.add_bool("test.yes", True)
    writer.add_bool("test.no", False)
    writer.add_string("test.text", "héllo ✓ 🙂")
    writer.add_array("test.tokens", ["a", "▁the", "", "日本"])
    writer.add_array("test.scores", [0.5, -1.25])
    writer.add_array("test.types", [1, 2, 3])
    writer.add_array("test.flags", [True, False])
    writer.add_tensor("token_embd.weight", np.arange(24, dtype=np.float32).reshape(4, 6))
    writer.add_tensor("output_norm.weight", np.ones(6, dtype=np.float16))
    blocks = np.arange(3 * 34, dtype=np.uint8).reshape(3, 34)
    writer.add_tensor("output.weight", blocks, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sample(tmp_path_factory.mktemp("gguf") / "sample.gguf")


def test_metadata_and_tensors_equal_the_reference_reader(sample: Path) -> None:
    file, reference = GGUFFile(sample), GGUFReader(sample)
    expected = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata == expected
    assert file.metadata["test.yes"] is True
    assert file.metadata["test.flags"] == [True, False]
    assert list(file.tensors) == ["token_embd.weight", "output_norm.weight", "output.weight"]
    for theirs in reference.tensors:
        ours = file.tensors[theirs.name]
        assert ours.shape == tuple(int(dim) for dim in reversed(theirs.shape))
        assert ours.ggml_type.name == theirs.tensor_type.name
        assert (ours.offset, ours.num_bytes) == (theirs.data_offset, theirs.n_bytes)
    file.close()


def test_bytes_are_those_of_the_file(sample: Path) -> None:
    file = GGUFFile(sample)
    quantised, plain = file.tensors["output.weight"], file.tensors["token_embd.weight"]
    assert file.read_blocks(quantised, (1, 0), (1, 1)).tolist() == [[list(range(34, 68))]]
    # Pages were given back; reading again must bring them back too.
    assert file.read_blocks(quantised, (0, 0), (3, 1)).ravel().tolist() == list(range(102))
    columns = file.read_blocks(plain, (2, 1), (2, 3))
    assert columns.shape == (2, 3, 4)
    assert columns.view("<f4").squeeze(-1).tolist() == [[13, 14, 15], [19, 20, 21]]
    file.close()


@pytest.mark.parametrize(
    ("starts", "counts"), [((0, 0), (4, 1)), ((0, 1), (1, 1)), ((-1, 0), (1, 1)), ((0, 0), (1, 0))]
)
def test_blocks_that_are_not_there(starts: tuple[int, int], counts: tuple[int, int], sample: Path) -> None:
    file = GGUFFile(sample)
    with pytest.raises(CheckpointError, match=r"blocks from .* of 'output.weight', which has \[3, 1\]"):
        file.read_blocks(file.tensors["output.weight"], starts, counts)
    file.close()


def test_block_sizes_equal_the_reference() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    for number, ggml_type in GGML_TYPES.items():
        kind = GGMLQuantizationType(number)
        assert kind.name == ggml_type.name
        assert GGML_QUANT_SIZES[kind] == (ggml_type.block_elements, ggml_type.block_bytes)


# Pieces to build headers by hand, from which lies are made.


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def header(
    pairs: list[bytes], tensors: list[bytes], *, num_pairs: int | None = None, num_tensors: int | None = None
) -> bytes:
    num_pairs = len(pairs) if num_pairs is None else num_pairs
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    start = b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + b"".join([*pairs, *tensors])
    return start + b"\0" * (-len(start) % 32)


U32, STRING, ARRAY = 4, 8, 9
HUGE = 2**64 - 1
DATA = b"\0" * 256


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * (depth - 1) + struct.pack("<IQI", U32, 1, 7)


LIES = {
    "empty file": (b"", "does not begin with"),
    "other file": (b"PK\x03\x04" + DATA, "does not begin with"),
    "only the magic": (b"GGUF", "ends inside the version"),
    "cut counts": (b"GGUF" + struct.pack("<IQ", 3, 0), "ends inside the number of metadata pairs"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "pairs": (header([], [], num_pairs=HUGE), f"announces {HUGE} metadata pairs"),
    "tensors": (header([], [], num_tensors=2**40), f"announces {2**40} tensors"),
    "key length": (
        header([struct.pack("<Q", HUGE) + b"key"], []) + DATA,
        f"announces {HUGE} bytes in the key",
    ),
    "key encoding": (header([pair(b"\xff\xfe", U32, b"\1\0\0\0")], []), "pair 0 is not valid UTF-8"),
    "key twice": (header([pair("a", U32, b"\1\0\0\0")] * 2, []), "'a' appears twice"),
    "value type": (header([pair("a", 13, b"\0" * 8)], []), "unknown value type 13"),
    "item type": (header([pair("a", ARRAY, struct.pack("<IQ", 99, 1))], []) + DATA, "unknown value type 99"),
    "boolean": (header([pair("a", 7, b"\2")], []), "boolean 2"),
    "string length": (header([pair("a", STRING, struct.pack("<Q", 2**63))], []), f"announces {2**63} bytes"),
    "string encoding": (header([pair("a", STRING, text(b"\xc3"))], []), "not valid UTF-8"),
    "numbers": (header([pair("a", ARRAY, struct.pack("<IQ", U32, 2**62))], []), f"announces {2**62} values"),
    "strings": (
        header([pair("a", ARRAY, struct.pack("<IQ", STRING, 2**61))], []),
        f"announces {2**61} strings",
    ),
    "string in array": (
        header([pair("a", ARRAY, struct.pack("<IQQ", STRING, 1, HUGE))], []) + DATA,
        f"string 0 of metadata 'a' has {HUGE} bytes",
    ),
    "string array encoding": (
        header([pair("a", ARRAY, struct.pack("<IQ", STRING, 2) + text("b") + text(b"\xff"))], []),
        "string 1 of metadata 'a' is not valid UTF-8",
    ),
    "string array end": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("a", ARRAY, struct.pack("<IQQ", STRING, 2, 8) + b"x" * 8),
        "announces 2 strings but ends after 1",
    ),
    "arrays in array": (
        header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 2**60))], []),
        "arrays in metadata",
    ),
    "depth": (header([pair("a", ARRAY, nested(5))], []), "nests arrays more than 4 deep"),
    "alignment 0": (header([pair("general.alignment", U32, b"\0" * 4)], []), "general.alignment is 0"),
    "alignment 24": (header([pair("general.alignment", U32, b"\x18\0\0\0")], []), "general.alignment is 24"),
    "alignment text": (
        header([pair("general.alignment", STRING, text("32"))], []),
        "general.alignment is '32'",
    ),
    "no dims": (header([], [tensor("t", [])]) + DATA, "has 0 dims"),
    "five dims": (header([], [tensor("t", [1] * 5)]) + DATA, "has 5 dims"),
    "dim 0": (header([], [tensor("t", [4, 0])]) + DATA, r"dim of 0: \[0, 4\]"),
    "huge dims": (header([], [tensor("t", [HUGE] * 4)]) + DATA, "past the end of the file"),
    "one byte too many": (
        header([], [tensor("t", [65])]) + DATA,
        "would lie in bytes 64 to 324, past the end",
    ),
    "offset": (header([], [tensor("t", [1], offset=HUGE - 31)]) + DATA, "past the end of the file"),
    "misaligned": (
        header([], [tensor("t", [1], offset=4)]) + DATA,
        "offset 4 of tensor 't' is not a multiple",
    ),
    "overlap": (header([], [tensor("t", [16]), tensor("u", [16], offset=32)]) + DATA, "'t' and 'u' overlap"),
    "tensor twice": (header([], [tensor("t", [1]), tensor("t", [1], offset=32)]) + DATA, "'t' appears twice"),
    "half a block": (
        header([], [tensor("t", [48], kind=8)]) + DATA,
        "rows of 48 elements, not a multiple of the 32",
    ),
    "known type": (
        header([], [tensor("t", [256], kind=10)]) + DATA,
        r"type Q2_K \(10\), which is not supported",
    ),
    "unknown type": (header([], [tensor("t", [256], kind=77)]) + DATA, r"type unknown \(77\)"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_without_allocating(lie: str, tmp_path: Path) -> None:
    content, message = LIES[lie]
    path = tmp_path / "liar.gguf"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=message) as caught:
            GGUFFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert peak < 2**20


def test_a_header_longer_than_any_real_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    with path.open("wb") as file:
        file.write(header([pair("a", STRING, struct.pack("<Q", 2**27))], []))
        file.truncate(2**28)  # sparse: takes no disk
    with pytest.raises(CheckpointError, match="past the 67108864 bytes a header may take"):
        GGUFFile(path)


def test_what_the_lies_are_made_from_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "honest.gguf"
    tensors = [tensor("t", [64]), tensor("u", [32], kind=8, offset=256)]
    path.write_bytes(header([pair("a", ARRAY, nested(4))], tensors) + DATA + b"\0" * 34)
    file = GGUFFile(path)
    assert file.metadata == {"a": [[[[7]]]]}
    assert [(t.shape, t.num_bytes) for t in file.tensors.values()] == [((64,), 256), ((32,), 34)]
    file.close()


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        GGUFFile(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match="cannot be opened: Is a directory"):
        GGUFFile(tmp_path)


def mutate(content: bytes, header_bytes: int, rng: random.Random) -> bytes:
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(header_bytes)
        match rng.randrange(6):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                value = rng.choice((0, 1, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63, HUGE - 7, HUGE))
                data[at : at + 8] = struct.pack("<Q", value)
            case 3:
                del data[at : at + rng.randrange(1, 9)]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                del data[at:]
        header_bytes = min(header_bytes, len(data))
        if not header_bytes:
            break
    return bytes(data)


def test_no_damage_does_more_than_raise_checkpoint_error(sample: Path, tmp_path: Path) -> None:
    content = sample.read_bytes()
    header_bytes = GGUFFile(sample).tensors["token_embd.weight"].offset
    rng = random.Random(0)
    path = tmp_path / "damaged.gguf"
    num_refused = 0
    for _ in range(2500):
        path.write_bytes(mutate(content, header_bytes, rng))
        try:
            GGUFFile(path).close()
        except CheckpointError:
            num_refused += 1
    assert 1200 < num_refused < 2500  # some damage cannot be seen, such as another letter in a name

"""Strict loading: what is checked, what is filled, and what it costs."""

import json
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from packing import library, needs_native
from safetensors.torch import save_file

from infinilm.distributed.shard import PackedShard, Shard, WeightShard
from infinilm.errors import CheckpointError
from infinilm.loading.checkpoint import Checkpoint, open_checkpoint
from infinilm.loading.gguf_checkpoint import GGUFCheckpoint
from infinilm.loading.safetensors_checkpoint import SafetensorsCheckpoint
from infinilm.loading.weights import check_shapes, load_weights


def make_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> SafetensorsCheckpoint:
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file(tensors, path / "model.safetensors")
    return SafetensorsCheckpoint(path)


def whole(targets: dict[str, torch.Tensor]) -> dict[str, WeightShard]:
    return {name: WeightShard.whole(target) for name, target in targets.items()}


def test_parameters_and_views_are_filled_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    stored = {"q": torch.randn(4, 3), "k": torch.randn(2, 3), "norm": torch.randn(3)}
    checkpoint = make_checkpoint(tmp_path, stored)
    fused = torch.nn.Parameter(torch.zeros(6, 3, dtype=torch.bfloat16))
    norm = torch.nn.Parameter(torch.zeros(3))
    load_weights(whole({"q": fused[:4], "k": fused[4:], "norm": norm}), checkpoint, show_progress=False)
    assert torch.equal(fused.data, torch.cat((stored["q"], stored["k"])).bfloat16())
    assert torch.equal(norm.data, stored["norm"])
    assert fused.requires_grad
    assert fused.grad_fn is None
    # The checkpoint stays open.
    assert torch.equal(checkpoint.read("q"), stored["q"])


def test_one_error_lists_everything_and_nothing_is_written(tmp_path: Path) -> None:
    stored = {f"extra.{index}": torch.zeros(1) for index in range(23)}
    stored |= {"good": torch.ones(2), "bad": torch.ones(2, 3), "flat": torch.ones(6)}
    checkpoint = make_checkpoint(tmp_path, stored)
    good = torch.zeros(2)
    targets = {"good": good, "bad": torch.zeros(3, 2), "flat": torch.zeros(6, 1), "lost": torch.zeros(5, 7)}
    with pytest.raises(CheckpointError) as caught:
        load_weights(whole(targets), checkpoint, show_progress=False)
    lines = str(caught.value).splitlines()
    assert str(tmp_path) in lines[0]
    assert lines[0].endswith("1 missing:")
    assert lines[1] == "  lost [5, 7]"
    assert lines[2] == "23 unexpected:"
    assert all(line.endswith(" [1]") and line.startswith("  extra.") for line in lines[3:23])
    assert lines[23] == "  and 3 more"
    assert lines[24:] == [
        "2 misshapen:",
        "  bad: [2, 3] in the checkpoint, [3, 2] in the model",
        "  flat: [6] in the checkpoint, [6, 1] in the model",
    ]
    assert torch.equal(good, torch.zeros(2))


def test_what_may_be_ignored(tmp_path: Path) -> None:
    stored = {"w": torch.ones(2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "head": torch.ones(1)}
    checkpoint = make_checkpoint(tmp_path, stored)
    with pytest.raises(CheckpointError, match=r"1 unexpected:\n  head \[1\]$"):
        check_shapes({"w": (2,)}, checkpoint)
    target = torch.zeros(2)
    load_weights(whole({"w": target}), checkpoint, is_ignorable=lambda name: name != "w", show_progress=False)
    assert torch.equal(target, torch.ones(2))


@needs_native
def test_quantised_matrices_are_filled_beside_plain_ones(tmp_path: Path) -> None:
    stored = {"w": torch.randn(20, 64), "norm": torch.randn(64)}
    checkpoint = make_checkpoint(tmp_path, stored)
    matrix, norm, out = library().Matrix("Q8_0", 24, 32), torch.zeros(64), torch.empty(18, 32)
    shard = PackedShard(matrix, (18, 32), (20, 64), (2, 32))
    load_weights({"w": shard, "norm": WeightShard.whole(norm)}, checkpoint, show_progress=False)
    matrix.dequantize(torch.arange(18), out)
    torch.testing.assert_close(out, stored["w"][2:, 32:], atol=0.02, rtol=0)
    assert norm.equal(stored["norm"])


def test_progress_is_shown_in_bytes_on_a_terminal_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make_checkpoint(tmp_path, {"w": torch.ones(250_000)})
    load_weights(whole({"w": torch.zeros(250_000)}), checkpoint)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    load_weights(whole({"w": torch.zeros(250_000)}), checkpoint, show_progress=False)
    assert capsys.readouterr() == ("", "")
    load_weights(whole({"w": torch.zeros(250_000)}), checkpoint)
    out, err = capsys.readouterr()
    assert out == ""
    assert "0.00/1.00M" in err


def test_an_error_while_reading_reaches_the_caller(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, {"w": torch.ones(3), "i": torch.ones(3, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match="'i' has type I64"):
        load_weights(whole({"w": torch.zeros(3), "i": torch.zeros(3)}), checkpoint, show_progress=False)


def test_the_number_of_torch_threads_is_left_as_it_was(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, {"w": torch.ones(3)})
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        load_weights(whole({"w": torch.zeros(3)}), checkpoint, show_progress=False)
        seen = [torch.get_num_threads()]
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [3, 3]
    finally:
        torch.set_num_threads(before)


def write_large(path: Path, num_rows: int) -> tuple[Checkpoint, str]:
    """One tensor of `num_rows` KiB in float16, as either format."""
    values = np.zeros((num_rows, 512), dtype=np.float16)
    values[:, 0] = np.arange(num_rows) % 1000
    if path.suffix != ".gguf":
        path.mkdir()
        return make_checkpoint(path, {"w": torch.from_numpy(values)}), "w"
    writer = GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    writer.add_context_length(16)
    writer.add_embedding_length(512)
    writer.add_feed_forward_length(1)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", values)
    for name, rows in (("attn_q", 512), ("attn_k", 512), ("ffn_gate", 1)):
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((rows, 512), dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GGUFCheckpoint(path), "model.embed_tokens.weight"


def resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
@pytest.mark.parametrize("name", ["model", "model.gguf"])
def test_peak_memory_stays_near_the_weights(name: str, tmp_path: Path) -> None:
    checkpoint, tensor = write_large(tmp_path / name, 96 * 1024)
    targets = {other: torch.zeros(shape, dtype=torch.float16) for other, shape in checkpoint.shapes().items()}
    num_bytes = sum(target.nbytes for target in targets.values())
    # The first time also pages in code and touches the targets; the second shows what reading itself takes.
    load_weights(whole(targets), checkpoint, show_progress=False)
    checkpoint.close()
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    checkpoint = open_checkpoint(tmp_path / name)
    load_weights(whole(targets), checkpoint, show_progress=False)
    assert resident_bytes("VmHWM") - before < num_bytes / 10
    expected = torch.arange(96 * 1024) % 1000
    assert torch.equal(targets[tensor][:, 0], expected.half())


@needs_native
@pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")
def test_peak_memory_stays_near_quantised_weights(smollm2: Path) -> None:
    """The file's pages are given back, and what is quantised is never there as floats."""
    checkpoint = open_checkpoint(smollm2)
    shapes, formats = checkpoint.shapes(), checkpoint.formats()
    targets: dict[str, Shard] = {
        name: PackedShard(library().Matrix(formats[name], *shape), shape, shape, (0, 0))
        if len(shape) == 2
        else WeightShard.whole(torch.zeros(shape))
        for name, shape in shapes.items()
    }
    num_bytes = sum(target.matrix.num_bytes for target in targets.values() if isinstance(target, PackedShard))
    assert num_bytes < 1.01 * checkpoint.num_bytes
    load_weights(targets, checkpoint, show_progress=False)
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    load_weights(targets, checkpoint, show_progress=False)
    assert resident_bytes("VmHWM") - before < checkpoint.num_bytes / 10

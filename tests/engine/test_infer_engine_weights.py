"""Weights that callers of `InferEngine` bring themselves."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import save
from engine.infer_cases import VOCAB_SIZE, assert_near, expected_logits, reference_of, text

from infinilm.engine import InferEngine
from infinilm.errors import InvalidTypeError, InvalidValueError
from infinilm.models import LlamaConfig

KIND = "mha"
NAME = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_of(KIND), tmp_path_factory.mktemp(KIND))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[InferEngine]:
    with InferEngine(path) as engine:
        yield engine


@pytest.fixture
def empty(path: Path) -> Iterator[InferEngine]:
    """One whose weights are random."""
    with InferEngine(LlamaConfig.from_pretrained(path)) as engine:
        yield engine


def logits_of(engine: InferEngine) -> torch.Tensor:
    logits = engine(input_ids=text(40), return_logits=True).logits
    assert logits is not None
    return logits


@pytest.mark.parametrize("convert", [lambda weight: weight, lambda weight: weight.numpy()], ids=["torch", "numpy"])
def test_weights_one_by_one_are_weights_from_a_file(
    engine: InferEngine, empty: InferEngine, convert: Callable[[torch.Tensor], Any]
) -> None:
    weights = reference_of(KIND).state_dict()
    assert sorted(weights) == sorted(empty.state_dict_keyname()) == sorted(engine.state_dict_keyname())
    assert not logits_of(empty).equal(logits_of(engine))
    for name, weight in weights.items():
        empty.load_param(name, convert(weight))
    assert logits_of(empty).equal(logits_of(engine))
    assert all(weight.equal(weights[name]) for name, weight in empty.state_dict()[0].items())


def test_all_weights_at_once(engine: InferEngine, empty: InferEngine) -> None:
    weights = dict(reference_of(KIND).state_dict())
    before = logits_of(empty)
    norm = weights.pop("model.norm.weight")
    with pytest.raises(InvalidValueError, match=r"1 weights are missing: model\.norm\.weight; .* strict=False"):
        empty.load_params(weights)
    with pytest.raises(InvalidValueError, match=r"the model has no weight 'model.nrom.weight'; state_dict_keyname"):
        empty.load_params({**weights, "model.nrom.weight": norm}, strict=False)
    with pytest.raises(InvalidValueError, match=r"model\.norm\.weight has shape \[95\]; the model's is \[96\]"):
        empty.load_params({**weights, "model.norm.weight": norm[1:]})
    with pytest.raises(InvalidTypeError, match="params is a list"):
        empty.load_params([weights])  # type: ignore[arg-type]
    with pytest.raises(InvalidTypeError, match="strict=0 must be True or False"):
        empty.load_params(weights, strict=0)  # type: ignore[arg-type]
    assert logits_of(empty).equal(before)  # nothing was loaded
    empty.load_params(weights, strict=False)
    empty.load_params({"model.norm.weight": norm}, strict=False)
    assert logits_of(empty).equal(logits_of(engine))


BAD_WEIGHTS = [
    ("k_proj", torch.ones(96, 96), InvalidValueError, "the model has no weight 'k_proj'; state_dict_keyname.. lists"),
    (7, torch.ones(96, 96), InvalidValueError, "the model has no weight 7"),
    (NAME, torch.ones(96, 95), InvalidValueError, r"k_proj.weight has shape \[96, 95\]; the model's is \[96, 96\]"),
    (NAME, torch.ones(()), InvalidValueError, r"k_proj.weight has shape \[\]"),
    (NAME, torch.ones(96, 96, dtype=torch.int64), InvalidTypeError, r"k_proj.*torch\.int64.*weights are .*float32"),
    (NAME, torch.ones(96, 96).to(torch.float8_e5m2), InvalidTypeError, r"k_proj.*torch\.float8_e5m2"),
    (NAME, torch.ones(96, 96, device="meta"), InvalidTypeError, "k_proj.*meta"),
    (NAME, torch.ones(96, 96).to_sparse(), InvalidTypeError, "k_proj.*sparse"),
    (NAME, np.ones((96, 96), dtype=np.int32), InvalidTypeError, "k_proj.*array of int32"),
    (NAME, np.ones((96, 96), dtype=complex), InvalidTypeError, "k_proj.*array of complex128"),
    (NAME, np.ones((96, 96), dtype=object), InvalidTypeError, "k_proj.*array of object"),
    (NAME, np.ones((96, 96), dtype=np.longdouble), InvalidTypeError, "k_proj.*array of float128"),
    (NAME, [[1.0] * 96] * 96, InvalidTypeError, "k_proj.weight is a list; give a torch tensor or a NumPy array"),
    (NAME, None, InvalidTypeError, "k_proj.weight is a NoneType"),
]


@pytest.mark.parametrize(("name", "tensor", "error", "message"), BAD_WEIGHTS, ids=lambda value: str(value)[:30])
def test_a_wrong_weight_names_itself_and_the_right_one_then_works(
    engine: InferEngine, name: Any, tensor: Any, error: type[Exception], message: str
) -> None:
    before = logits_of(engine)
    with pytest.raises(error, match=message):
        engine.load_param(name, tensor)
    assert logits_of(engine).equal(before)
    engine.load_param(NAME, reference_of(KIND).state_dict()[NAME])
    assert logits_of(engine).equal(before)


def test_weights_in_every_layout_and_type(empty: InferEngine) -> None:
    weight = reference_of(KIND).state_dict()[NAME]
    fixed = weight.numpy().copy()
    fixed.flags.writeable = False
    forms = [
        *(weight.t().contiguous().t(), weight.clone().requires_grad_(), weight.double(), weight.numpy().astype(">f4")),
        *(weight.flip(0).contiguous().numpy()[::-1], fixed, weight.double().numpy(), np.asfortranarray(weight.numpy())),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for form in forms:
            empty.load_param(NAME, torch.zeros(96, 96))
            empty.load_param(NAME, form)
            assert empty.state_dict()[0][NAME].equal(weight)
    for form in (weight.half(), weight.bfloat16(), weight.half().numpy()):
        empty.load_param(NAME, form)
        assert empty.state_dict()[0][NAME].equal(torch.as_tensor(form).float())


def test_a_tied_head_is_passed_over(tmp_path: Path) -> None:
    weights = reference_of("tied").state_dict()
    assert "lm_head.weight" in weights
    path = save(reference_of("tied"), tmp_path)
    with InferEngine(path) as loaded, InferEngine(LlamaConfig.from_pretrained(path)) as engine:
        engine.load_params(weights)
        assert logits_of(engine).equal(logits_of(loaded))
        engine.load_param("lm_head.weight", torch.zeros(VOCAB_SIZE, 96))
        engine.load_param("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
        assert logits_of(engine).equal(logits_of(loaded))
        assert "lm_head.weight" not in engine.state_dict_keyname()
        assert_near(logits_of(engine), expected_logits("tied", text(40)))

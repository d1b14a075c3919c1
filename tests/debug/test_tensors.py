"""Statistics and comparisons of tensors, by values worked out by hand."""

import math

import numpy as np
import pytest
import torch
from narrow import present

from infinilm.debug import TensorComparison, TensorStats, compare_tensors, tensor_stats
from infinilm.errors import InvalidTypeError, InvalidValueError

NAN, INF = math.nan, math.inf

STATS = [
    (torch.tensor([[1.0, -2.0], [4.0, 5.0]]), TensorStats((2, 2), "float32", -2.0, 5.0, 2.0, 0, 0)),
    (torch.tensor([1.0, NAN, INF, -INF, 3.0]).half(), TensorStats((5,), "float16", 1.0, 3.0, 2.0, 1, 2)),
    (torch.tensor([60000.0, 60000.0]).half(), TensorStats((2,), "float16", 60000.0, 60000.0, 60000.0, 0, 0)),
    (torch.tensor(2.5).bfloat16(), TensorStats((), "bfloat16", 2.5, 2.5, 2.5, 0, 0)),
    (torch.tensor([1.5, -4.0]).to(torch.float8_e4m3fn), TensorStats((2,), "float8_e4m3fn", -4.0, 1.5, -1.25, 0, 0)),
    (torch.tensor([[-7, 2**60]]), TensorStats((1, 2), "int64", -7, 2**60, (2**60 - 7) / 2, 0, 0)),
    (torch.tensor([True, False, True, True]), TensorStats((4,), "bool", 0, 1, 0.75, 0, 0)),
    (torch.tensor([1.0, 2.0], requires_grad=True), TensorStats((2,), "float32", 1.0, 2.0, 1.5, 0, 0)),
    (torch.zeros(0, 3), TensorStats((0, 3), "float32", None, None, None, 0, 0)),
    (torch.tensor([NAN, INF]), TensorStats((2,), "float32", None, None, None, 1, 1)),
    (np.array([3, 1, 2], dtype=np.int16)[::-1], TensorStats((3,), "int16", 1, 3, 2.0, 0, 0)),
    (np.array([[NAN, 0.5]]).T, TensorStats((2, 1), "float64", 0.5, 0.5, 0.5, 1, 0)),
    (np.array([0, 2**64 - 1], dtype=np.uint64), TensorStats((2,), "uint64", 0.0, 2.0**64, 2.0**63, 0, 0)),
    (torch.tensor([0, 2**64 - 1], dtype=torch.uint64), TensorStats((2,), "uint64", 0.0, 2.0**64, 2.0**63, 0, 0)),
    (np.array([1.5, 2.5], dtype=">f4"), TensorStats((2,), ">f4", 1.5, 2.5, 2.0, 0, 0)),
]


@pytest.mark.parametrize(("tensor", "stats"), STATS)
def test_statistics_are_those_of_the_finite_values(tensor, stats):
    assert tensor_stats(tensor) == stats


def test_statistics_can_be_read():
    assert (
        str(tensor_stats(torch.tensor([[1.5, NAN, INF]]))) == "float32 [1, 3]: min 1.5, max 1.5, mean 1.5, 1 NaN, 1 inf"
    )
    assert str(tensor_stats(torch.tensor([1, 2**60]))).startswith("int64 [2]: min 1, max 1152921504606846976, mean ")
    assert str(tensor_stats(torch.zeros(0))) == "float32 [0]: no finite values, 0 NaN, 0 inf"


A = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
B = torch.tensor([[1.0, 2.5, 3.0], [4.0, 3.0, 6.0]])


def test_a_comparison_says_where_and_by_how_much():
    assert compare_tensors(A, B, rtol=0, atol=0.5) == TensorComparison(
        shape_a=(2, 3),
        shape_b=(2, 3),
        dtype_a="float32",
        dtype_b="float32",
        rtol=0,
        atol=0.5,
        are_equal=False,
        is_close=False,
        max_abs_diff=2.0,
        where=(1, 1),
        value_a=5.0,
        value_b=3.0,
        mean_abs_diff=2.5 / 6,
        num_different=1,
        share_different=1 / 6,
        num_nan_mismatches=0,
        num_inf_mismatches=0,
    )
    assert str(compare_tensors(A, B, rtol=0, atol=0.5)) == (
        "float32 [2, 3], not close (rtol 0, atol 0.5); beyond that: 1 of 6 (16.667%); "
        "largest difference 2 at [1, 1]: 5 and 3; mean difference 0.416666667"
    )


@pytest.mark.parametrize(
    ("rtol", "atol", "num_different"),
    [
        (0, 0, 2),
        (0, 0.49, 2),
        (0, 0.5, 1),
        (0, 1.99, 1),
        (0, 2, 0),
        (0.2, 0, 1),
        (0.19, 0, 2),
        (0.67, 0, 0),
        (0.5, 0.5, 0),
    ],
)
def test_the_tolerance_is_relative_to_b(rtol, atol, num_different):
    # The differences are 0.5 at b = 2.5 and 2 at b = 3.
    comparison = compare_tensors(A, B, rtol=rtol, atol=atol)
    assert comparison.num_different == num_different
    assert comparison.is_close == (num_different == 0)
    assert not comparison.are_equal
    assert (comparison.max_abs_diff, comparison.where) == (2.0, (1, 1))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (A, A.clone()),
        (A, A.numpy()),
        (A.half(), A.double()),
        (A.int(), A),
        (torch.tensor([NAN, INF, -INF, 0.0]), torch.tensor([NAN, INF, -INF, -0.0])),
        (torch.tensor([True, False]), np.array([1, 0])),
        (torch.zeros(0, 2), torch.zeros(0, 2)),
        (torch.tensor(3), torch.tensor(3)),
    ],
)
def test_equal_values_are_equal_in_any_dtype(a, b):
    comparison = compare_tensors(a, b, rtol=0, atol=0)
    assert comparison.are_equal
    assert comparison.is_close
    assert (comparison.max_abs_diff, comparison.num_different, comparison.share_different) == (0.0, 0, 0.0)
    assert (comparison.where, comparison.value_a, comparison.value_b) == (None, None, None)


def test_equality_can_be_read():
    assert str(compare_tensors(A, A)) == "float32 [2, 3], equal"
    assert str(compare_tensors(A.half(), A)) == "float16 and float32 [2, 3], equal"


def test_close_is_not_equal():
    comparison = compare_tensors(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-22]))
    assert comparison.is_close
    assert not comparison.are_equal
    assert (comparison.max_abs_diff, comparison.where, comparison.num_different) == (2**-22, (1,), 0)
    assert str(comparison) == (
        "float32 [2], close (rtol 1e-05, atol 1e-08); beyond that: 0 of 2 (0.000%); "
        "largest difference 2.38418579e-07 at [1]: 2 and 2.00000024; mean difference 1.1920929e-07"
    )


def test_shapes_that_differ_are_a_result():
    comparison = compare_tensors(A, A.T.int())
    assert not comparison.is_close
    assert not comparison.are_equal
    assert (comparison.shape_a, comparison.shape_b) == ((2, 3), (3, 2))
    assert (comparison.max_abs_diff, comparison.where, comparison.num_different) == (None, None, None)
    assert str(comparison) == "float32 and int32, not close: shapes [2, 3] and [3, 2] differ"


def test_nan_and_infinity_differ_from_everything_but_themselves():
    a = torch.tensor([0.0, NAN, NAN, INF, INF, INF, 1.0, 1.0])
    b = torch.tensor([9.0, NAN, 1.0, INF, -INF, 1.0, NAN, INF])
    for tolerance in (0, 1e300):
        comparison = compare_tensors(a, b, rtol=0, atol=tolerance)
        assert not comparison.is_close
        assert comparison.num_different == (6 if tolerance == 0 else 5)
        assert (comparison.num_nan_mismatches, comparison.num_inf_mismatches) == (2, 3)
        assert (comparison.max_abs_diff, comparison.where, comparison.value_b) == (INF, (2,), 1.0)
        assert math.isnan(present(comparison.value_a))
        assert comparison.mean_abs_diff == 9.0
        assert str(comparison).endswith(
            "largest difference inf at [2]: nan and 1; mean difference 9; NaN mismatches: 2; inf mismatches: 3"
        )
    assert compare_tensors(a[-1:], b[-1:], rtol=1, atol=0).num_different == 1
    assert compare_tensors(a[2:3], b[2:3]).mean_abs_diff is None


def test_integers_are_compared_exactly():
    a = torch.tensor([5, 2**60 + 1])
    comparison = compare_tensors(a, torch.tensor([5, 2**60]), rtol=0, atol=0)
    assert not comparison.are_equal
    assert (comparison.where, comparison.value_a, comparison.value_b) == ((1,), 2**60 + 1, 2**60)
    assert compare_tensors(torch.tensor([3, -4]), torch.tensor([3, 4])).max_abs_diff == 8.0


def test_scalars_are_compared():
    comparison = compare_tensors(torch.tensor(1.0), np.array(4.0))
    assert (comparison.max_abs_diff, comparison.where, comparison.share_different) == (3.0, (), 1.0)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([1.0, 2.0], "is list; it must be a tensor or a NumPy array"),
        (None, "is NoneType"),
        (torch.zeros(2, dtype=torch.complex64), "is a tensor of torch.complex64; it must hold real numbers"),
        (np.zeros(2, dtype=np.complex64), "is an array of complex64; it must hold real numbers"),
        (np.array(["a"]), "is an array of <U1"),
        (np.array([None]), "is an array of object"),
    ],
)
def test_what_has_no_real_numbers_is_refused(bad, message):
    for name, call in [
        ("tensor", lambda: tensor_stats(bad)),
        ("a", lambda: compare_tensors(bad, A)),
        ("b", lambda: compare_tensors(A, bad)),
    ]:
        with pytest.raises(InvalidTypeError, match=f"^{name} {message}"):
            call()


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_tolerances_are_checked(name):
    for bad in (-1e-9, NAN, INF):
        with pytest.raises(InvalidValueError, match=f"{name}={bad}"):
            compare_tensors(A, B, **{name: bad})
    with pytest.raises(InvalidTypeError, match=f"{name}='1'"):
        compare_tensors(A, B, **{name: "1"})  # type: ignore[arg-type]

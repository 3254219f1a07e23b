"""Every error is an EntrenarError with a hint and an exit code, and stays catchable by builtin kind."""

from __future__ import annotations

import pytest

from entrenar import errors
from entrenar.checks import check_dtype, check_ndim, check_positive, check_same_dtype, check_shape


def kinds() -> list[type[errors.EntrenarError]]:
    return [getattr(errors, name) for name in errors.__all__]


@pytest.mark.parametrize("kind", kinds(), ids=lambda k: k.__name__)
def test_every_kind_is_an_entrenar_error_with_an_exit_code(kind: type) -> None:
    assert issubclass(kind, errors.EntrenarError)
    assert kind.exit_code in (1, 2, 3)  # type: ignore[attr-defined]


def test_message_and_hint_are_both_shown() -> None:
    error = errors.ConfigError("lora_rank is 0, wanted at least 1", "set lora_rank=16")
    assert str(error) == "lora_rank is 0, wanted at least 1; set lora_rank=16"
    assert error.hint == "set lora_rank=16"
    assert str(errors.ConfigError("lora_rank is 0")) == "lora_rank is 0"


def test_a_gpu_that_is_missing_is_a_device_error() -> None:
    assert issubclass(errors.CudaNotAvailableError, errors.DeviceError)
    assert errors.CudaNotAvailableError("none").exit_code == 3


class Array:
    """Something with a shape and a dtype."""

    def __init__(self, shape: tuple[int, ...], dtype: str = "torch.float32") -> None:
        self.shape, self.dtype = shape, dtype


def test_shapes_are_checked() -> None:
    check_shape("gemm", "a", Array((2, 3)), (2, -1))
    with pytest.raises(
        errors.ShapeMismatchError, match=r"gemm: a has shape \(2, 3\), wanted \(any, 4\)"
    ):
        check_shape("gemm", "a", Array((2, 3)), (-1, 4))
    with pytest.raises(errors.ShapeMismatchError, match=r"wanted \(6\)"):
        check_shape("gemm", "a", Array((2, 3)), (6,))
    with pytest.raises(errors.ShapeMismatchError, match="wanted 1 or 3 dimensions"):
        check_ndim("gemm", "a", Array((2, 3)), 1, 3)


def test_dtypes_are_checked() -> None:
    check_dtype("gemm", "a", Array((2,)))
    check_same_dtype("gemm", a=Array((2,)), b=Array((2,), "float32"), c=None)
    with pytest.raises(errors.DTypeError, match="gemm: a is int64, wanted float32"):
        check_dtype("gemm", "a", Array((2,), "torch.int64"))
    with pytest.raises(errors.DTypeError, match="a float32, b float16, wanted one dtype"):
        check_same_dtype("gemm", a=Array((2,)), b=Array((2,), "float16"))


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_settings_must_be_positive(value: float) -> None:
    check_positive("rms_norm", "eps", 1e-6)
    with pytest.raises(errors.ShapeMismatchError, match="eps is"):
        check_positive("rms_norm", "eps", value)

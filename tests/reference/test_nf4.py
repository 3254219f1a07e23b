"""NF4 in NumPy against bitsandbytes' bits, and the faults that others reported."""

from __future__ import annotations

import importlib.util
import pathlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from entrenar.cpu import nf4 as fast
from entrenar.errors import ConfigError, DTypeError, NumericsError, ShapeMismatchError
from entrenar.reference import nf4 as plain
from entrenar.reference.nf4 import NF4_CODE, NF4Weight

DATA = pathlib.Path(__file__).parents[1] / "data"
LEVELS = [
    -1.0,
    -0.6961928,
    -0.5250731,
    -0.3949175,
    -0.2844414,
    -0.1847734,
    -0.0910500,
    0.0,
    0.0795803,
    0.1609302,
    0.2461123,
    0.3379152,
    0.4407098,
    0.5626170,
    0.7229568,
    1.0,
]
MIDDLES = [
    -0.8480964,
    -0.6106329,
    -0.4599953,
    -0.3396794,
    -0.2346074,
    -0.1379117,
    -0.0455250,
    0.0397901,
    0.1202552,
    0.2035213,
    0.2920138,
    0.3893125,
    0.5016634,
    0.6427869,
    0.8614784,
]


def _maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_nf4_golden", DATA / "make_nf4_golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _same_bits(got: np.ndarray, wanted: np.ndarray) -> bool:
    return got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes()


def _to_bytes(values: np.ndarray, dtype: str, maker: ModuleType) -> np.ndarray:
    """Round decoded float32 values to ``dtype`` and return their bytes."""
    if dtype == "bfloat16":
        return (maker.round_bfloat16(values).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


@pytest.fixture(scope="module")
def golden() -> tuple[ModuleType, dict[str, np.ndarray]]:
    maker = _maker()
    with np.load(DATA / "nf4_golden.npz") as file:
        held = dict(file)
    made = maker.digest([x for x, _, _ in maker.inputs()])
    assert made == str(held["inputs"]), (
        "this NumPy generates other inputs than the file was made of"
    )
    return maker, held


@pytest.fixture(params=[plain, fast], ids=["reference", "cpu"])
def nf4(request: pytest.FixtureRequest) -> Any:
    return request.param


class TestBitsandbytes:
    """Golden bits of bitsandbytes 0.50 on a CPU; see tests/data/make_nf4_golden.py."""

    def test_codes_and_absmax(self, nf4: Any, golden: Any) -> None:
        maker, held = golden
        code_at = scale_at = 0
        for i, (x, dtype, block) in enumerate(maker.inputs()):
            w = nf4.nf4_quantize(x, block)
            n_codes, n_scales = -(-x.size // 2), -(-x.size // block)
            assert _same_bits(w.codes, held["codes"][code_at : code_at + n_codes]), i
            assert _same_bits(w.absmax, held["absmax"][scale_at : scale_at + n_scales]), i
            code_at, scale_at = code_at + n_codes, scale_at + n_scales
            decoded = np.ascontiguousarray(nf4.nf4_dequantize(w)).reshape(-1)
            assert maker.digest([_to_bytes(decoded, dtype, maker)]) == held["decoded"][2 * i], i
        assert code_at == held["codes"].size
        assert scale_at == held["absmax"].size

    def test_double_quantisation(self, nf4: Any, golden: Any) -> None:
        maker, held = golden
        code_at = scale_at = nested_at = 0
        for i, (x, dtype, block) in enumerate(maker.inputs()):
            offset = held["offset"][i : i + 1]
            ours = nf4.nf4_quantize(x, block, double_quant=True)
            assert ours.absmax is None
            # ours is the float64 mean, rounded; bitsandbytes' float32 sum is up to 3.5 ulp off it
            assert abs(ours.offset - offset) <= 4 * np.spacing(offset), i
            exact = held["absmax"][scale_at : scale_at + ours.absmax_codes.size].astype(np.float64)
            assert abs(ours.offset - exact.mean()) <= np.spacing(ours.offset), i
            n_codes, n_scales, n_nested = -(-x.size // 2), ours.absmax_codes.size, ours.absmax2.size
            absmax = held["absmax"][scale_at : scale_at + n_scales]
            codes, absmax2 = nf4._quantize_absmax(absmax, offset)
            assert _same_bits(codes, held["absmax_codes"][scale_at : scale_at + n_scales]), i
            assert _same_bits(absmax2, held["absmax2"][nested_at : nested_at + n_nested]), i
            assert _same_bits(ours.codes, held["codes"][code_at : code_at + n_codes]), i
            shape = (x.size,)
            w = NF4Weight(ours.codes, None, shape, "float32", block, codes, absmax2, offset)
            decoded = np.ascontiguousarray(nf4.nf4_dequantize(w))
            assert maker.digest([_to_bytes(decoded, dtype, maker)]) == held["decoded"][2 * i + 1], i
            code_at, scale_at = code_at + n_codes, scale_at + n_scales
            nested_at += n_nested
        assert nested_at == held["absmax2"].size


class TestTable:
    def test_order_and_values(self, nf4: Any) -> None:
        """https://github.com/paiml/entrenar/issues/298: another order of valid levels."""
        codes = np.arange(16, dtype=np.uint8)
        w = NF4Weight((codes[::2] << 4) | codes[1::2], np.float32([1.0]), (16,), "float32")
        got = nf4.nf4_dequantize(w)
        np.testing.assert_allclose(got, LEVELS, atol=1e-7, rtol=0)
        assert got[0] == -1
        assert got[7] == 0
        assert got[15] == 1
        assert (np.diff(got) > 0).all()

    def test_is_read_only(self) -> None:
        """https://github.com/artidoro/qlora/issues/299: slightly different tables circulate."""
        assert NF4_CODE.shape == (16,)
        assert NF4_CODE.dtype == np.float32
        with pytest.raises(ValueError, match="read-only"):
            NF4_CODE[0] = 0

    def test_dynamic_levels(self) -> None:
        assert plain.DYNAMIC_CODE.shape == (256,)
        assert (np.diff(plain.DYNAMIC_CODE) > 0).all()
        assert plain.DYNAMIC_CODE[-1] == 1
        assert plain.DYNAMIC_CODE[127] == 0


class TestQuantize:
    def test_first_value_is_in_the_high_nibble(self, nf4: Any) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1472."""
        w = nf4.nf4_quantize(np.float32([0.5, -1.0, 0.25, 2.0]))
        assert w.absmax.tolist() == [2.0]
        assert w.codes.tolist() == [0xA2, 0x9F]
        decoded = nf4.nf4_dequantize(w)
        np.testing.assert_allclose(decoded, [0.4922246, -1.0501461, 0.3218604, 2.0], atol=1e-6)

    @pytest.mark.parametrize("n", [1, 63, 65, 100, 127, 4097])
    def test_short_last_block(self, nf4: Any, n: int) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1884."""
        memory = np.full(n + 64, 1e30, np.float32)
        memory[:n] = np.arange(n) % 5 - 2
        w = nf4.nf4_quantize(memory[:n])
        assert w.absmax.size == -(-n // 64)
        assert w.absmax[-1] == np.abs(memory[n - (n - 1) % 64 - 1 : n]).max()
        decoded = nf4.nf4_dequantize(w)
        assert decoded.shape == (n,)
        assert np.abs(decoded - memory[:n]).max() <= 2 * 0.1520

    def test_zero_block(self, nf4: Any) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1283."""
        with np.errstate(all="raise"):
            w = nf4.nf4_quantize(np.zeros(64, np.float32))
            decoded = nf4.nf4_dequantize(w)
        assert w.absmax.tolist() == [0.0]
        assert set(w.codes.tolist()) == {0x77}
        assert not np.signbit(decoded).any()
        assert (decoded == 0).all()

    def test_short_zero_block(self, nf4: Any) -> None:
        """Bitsandbytes stores its floor of 1e-38 for a short last block; it decodes to zeros."""
        w = nf4.nf4_quantize(np.zeros(70, np.float32))
        assert w.absmax.tolist() == [0.0, float(np.float32(1e-38))]
        assert (nf4.nf4_dequantize(w) == 0).all()

    def test_midpoints(self, nf4: Any) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1283: the thresholds."""
        middles = (NF4_CODE[:-1] + NF4_CODE[1:]) / np.float32(2)
        np.testing.assert_allclose(middles, MIDDLES, atol=1e-7, rtol=0)
        ties = np.append(middles, np.float32(1))
        above = np.append(np.nextafter(middles, np.float32(2)), np.float32(1))
        for values, wanted in ((ties, range(15)), (above, range(1, 16))):
            codes = nf4.nf4_quantize(np.tile(values, 4)).codes[:8]
            unpacked = np.stack([codes >> 4, codes & 15], axis=1).reshape(-1)
            assert unpacked[:15].tolist() == list(wanted)
        w = nf4.nf4_quantize(np.float32([1.0, -1.0, 0.87, 0.86]))
        assert w.codes.tolist() == [0xF0, 0xFE]

    @pytest.mark.parametrize(
        "x",
        [np.arange(72.0).reshape(3, 4, 6)[:, ::2, :], np.arange(128.0).reshape(64, 2).T],
        ids=["step", "transposed"],
    )
    def test_strided(self, nf4: Any, x: np.ndarray) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/1342."""
        w, wanted = nf4.nf4_quantize(x), nf4.nf4_quantize(np.ascontiguousarray(x))
        assert _same_bits(w.codes, wanted.codes)
        assert _same_bits(w.absmax, wanted.absmax)

    @pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
    @pytest.mark.parametrize("shape", [(7,), (1, 7), (7, 1), (2, 3, 5), (), (0,), (2, 0)])
    def test_shape_and_dtype_return(self, nf4: Any, shape: tuple[int, ...], dtype: str) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2047."""
        x = np.random.default_rng(0).standard_normal(shape).astype(dtype)
        for double in (False, True):
            w = nf4.nf4_quantize(x if shape else np.array(x, dtype), 64, double)
            decoded = nf4.nf4_dequantize(w)
            assert decoded.shape == shape
            assert decoded.dtype == dtype
            assert nf4.nf4_dequantize(w, "float64").dtype == np.float64

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_non_finite_is_refused(self, nf4: Any, value: float) -> None:
        """https://github.com/huggingface/peft/issues/1009: a block destroyed in silence."""
        x = np.ones((2, 64), np.float32)
        x[1, 6] = value
        with pytest.raises(NumericsError, match=r"1 values .* \(1, 6\)"):
            nf4.nf4_quantize(x)

    def test_beyond_float32_is_refused(self, nf4: Any) -> None:
        with pytest.raises(NumericsError, match="beyond float32"):
            nf4.nf4_quantize(np.full(64, 1e300))

    def test_sizes_past_31_bits(self) -> None:
        """https://github.com/bitsandbytes-foundation/bitsandbytes/issues/2071."""
        assert plain._sizes((128, 4096, 4096), 64) == (2**31, 1073741824, 33554432)
        assert plain._sizes((2**31 - 64,), 64)[2] == 2**31 // 64 - 1

    @pytest.mark.parametrize("block_size", [0, -64, 16, 63, 8192])
    def test_block_sizes(self, nf4: Any, block_size: int) -> None:
        with pytest.raises(ConfigError, match=f"block_size is {block_size}"):
            nf4.nf4_quantize(np.zeros(64, np.float32), block_size)

    def test_encoding_what_was_decoded_changes_nothing(self, nf4: Any) -> None:
        x = np.random.default_rng(1).standard_normal((33, 64)).astype(np.float32)
        w = nf4.nf4_quantize(x)
        again = nf4.nf4_quantize(nf4.nf4_dequantize(w))
        # a block whose largest value is negative keeps its sign; both ends are levels
        assert _same_bits(again.codes, w.codes)
        assert _same_bits(again.absmax, w.absmax)


class TestDequantize:
    def test_error_is_half_a_gap(self, nf4: Any) -> None:
        x = np.random.default_rng(2).standard_normal((40, 64)).astype(np.float32)
        w = nf4.nf4_quantize(x)
        assert (np.abs(nf4.nf4_dequantize(w) - x) <= w.absmax[:, None] * 0.1520).all()

    def test_writes_to_out(self, nf4: Any) -> None:
        w = nf4.nf4_quantize(np.random.default_rng(3).standard_normal((6, 64)))
        wanted = nf4.nf4_dequantize(w, "float32")
        for out in (np.empty((6, 64), np.float32), np.empty((6, 128), np.float32)[:, ::2]):
            assert nf4.nf4_dequantize(w, out=out) is out
            np.testing.assert_array_equal(out, wanted.astype(out.dtype))

    def test_refuses_the_storage_of_another_weight(self, nf4: Any) -> None:
        w = nf4.nf4_quantize(np.ones((2, 64), np.float32))
        other = NF4Weight(w.codes, w.absmax, (3, 64), "float32")
        with pytest.raises(ShapeMismatchError, match="codes"):
            nf4.nf4_dequantize(other)
        few = NF4Weight(w.codes, w.absmax[:1], (2, 64), "float32")
        with pytest.raises(ShapeMismatchError, match="absmax"):
            nf4.nf4_dequantize(few)

    def test_refuses_an_integer_dtype(self, nf4: Any) -> None:
        with pytest.raises(DTypeError, match="int8"):
            nf4.nf4_dequantize(nf4.nf4_quantize(np.ones(64, np.float32)), "int8")

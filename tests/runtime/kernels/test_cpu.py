"""The kernels in C++: products against float64, the same bits in every company."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import InvalidRequest
from palmette.runtime.kernels import cpu
from palmette.runtime.kernels.cpu import Blocks, Format, PackedLinear

native = cpu.extension()
pytestmark = pytest.mark.skipif(native is None, reason="the extension was not built")
NAMES: list[str] = [] if native is None else native.available()
KINDS = ("float32", "bfloat16", "compact", *cpu.BLOCK_FORMATS)
TWO_HALVES = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
LONG = ("Q4_K", "Q5_K", "Q6_K")  # blocks of 256
WITH_OFFSETS = (
    *TWO_HALVES,
    "Q4_0",
    "Q5_0",
)  # which are negative multiples of scales in the last two
SET, ADD, GATED = 0, 1, 2


def blocks_of(kind: str, n: int, k: int, seed: int) -> tuple[Blocks, torch.Tensor]:
    """Random blocks as files have them, and what the gguf package reads in them, in float64."""
    rng = np.random.default_rng(seed)
    number = gguf.GGMLQuantizationType[kind]
    length, size = gguf.GGML_QUANT_SIZES[number]
    raw = rng.integers(0, 256, (n, k // length, size), np.uint8)
    largest = 0.02 if length == 32 else 0.0005  # these are multiplied by scales of 6 or 8 bits
    scales = rng.uniform(-largest, largest, (n, k // length, 2)).astype(np.float16)
    scales[rng.random(scales.shape) < 0.1] = 3e-7  # subnormal
    where = slice(208, 210) if kind == "Q6_K" else slice(0, 4 if kind in TWO_HALVES else 2)
    raw[:, :, where] = scales.view(np.uint8)[:, :, : where.stop - where.start]
    rows = raw.reshape(n, -1)
    meant = quants.dequantize(rows, number).astype(np.float64)
    return Blocks(kind, torch.from_numpy(rows)), torch.from_numpy(meant.reshape(n, k))


def linear_of(
    kind: str, n: int, k: int, seed: int, **options: Any
) -> tuple[PackedLinear, torch.Tensor]:
    """A packed weight and what it means, in float64, but for the rounding of scales."""
    if kind in cpu.BLOCK_FORMATS:
        part, meant = blocks_of(kind, n, k, seed)
        linear = PackedLinear([part], k, dtype=torch.float32, **options)
        return linear, linear.rows().double() if kind in LONG else meant
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    if kind == "compact":
        options["compact"] = True
        weight = strewn(weight, seed)
    return PackedLinear([weight], k, dtype=dtype, **options), weight.to(dtype).double()


def strewn(weight: torch.Tensor, seed: int) -> torch.Tensor:
    """The weight with zeros, and with a few numbers that are far smaller than their neighbours."""
    n, k = weight.shape
    rng = np.random.default_rng(seed)
    weight.view(-1)[rng.integers(0, n * k, n * k // 8)] = 0
    weight.view(-1)[rng.integers(0, n * k, n * k // 512)] *= 1e-6
    return weight


def has(name: str, kind: str) -> bool:
    return kind != "compact" or native.has_b12(name)


PAIRS = [(name, kind) for name in NAMES for kind in KINDS if has(name, kind)]


def multiply(
    name: str, linear: PackedLinear, x: torch.Tensor, ending: int = SET, is_exact: bool = False
) -> torch.Tensor:
    """What the kernels make of rows of float32."""
    n = linear.num_outputs // (2 if ending == GATED else 1)
    y = torch.zeros(len(x), n)
    native.multiply(name, is_exact, linear.handle, x.data_ptr(), len(x), y.data_ptr(), ending)
    return y


@pytest.mark.parametrize(("name", "kind"), PAIRS)
@pytest.mark.parametrize("is_exact", [False, True])
@settings(max_examples=25)
@given(
    tiles=st.integers(1, 9),
    blocks=st.integers(1, 12),
    rows=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_products_are_those_of_float64_and_of_each_row_alone(
    name: str, kind: str, is_exact: bool, tiles: int, blocks: int, rows: int, seed: int
) -> None:
    if kind in LONG:
        blocks = blocks // 4 * 8 + 8
    n, k = 16 * tiles, 32 * blocks
    linear, weight = linear_of(kind, n, k, seed)
    x = torch.randn(rows, k, generator=torch.Generator().manual_seed(seed + 1))
    x[:, seed % 40 :: 40] *= 10.0 ** (seed % 4)  # as channels of models stand out
    y = multiply(name, linear, x, is_exact=is_exact)
    taken = native.takes(name, is_exact, linear.format)
    exact = (x.bfloat16() if taken == "bfloat16" else x).double()
    # Every one of k products and sums rounds once, in blocks twice more.
    bound = (k + 4) * 2.0**-24 * (exact.abs() @ weight.abs().T) + 1e-30
    if kind in WITH_OFFSETS:  # numbers and offsets are summed apart
        bound = bound + (k + 4) * 2.0**-24 * exact.abs().sum(-1, keepdim=True)
    if taken.startswith("int"):  # half a step of each block
        most, second = exact.view(rows, blocks, 32).abs().topk(2).values.unbind(-1)
        steps = most / 32767 if taken == "int16" else torch.maximum(second / 127, most / 2159)
        steps = steps[:, :, None].expand(-1, -1, 32).reshape(rows, k)
        bound = bound + 0.501 * steps @ weight.abs().T
    assert ((y.double() - exact @ weight.T).abs() <= bound).all()
    for row in {0, rows // 2, rows - 1}:
        alone = multiply(name, linear, x[row : row + 1], is_exact=is_exact)
        assert torch.equal(alone[0], y[row])


@pytest.mark.parametrize(("name", "kind"), PAIRS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_none_and_spoils_its_row_only(
    name: str, kind: str, bad: float
) -> None:
    linear, _ = linear_of(kind, 32, 256, 3)
    x = torch.randn(3, 256)
    y = multiply(name, linear, x)
    x[1, 40] = bad
    spoilt = multiply(name, linear, x)
    assert not spoilt[1].isfinite().any()
    assert torch.equal(spoilt[[0, 2]], y[[0, 2]])


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_what_becomes_of_products(name: str, kind: str) -> None:
    bias = torch.randn(64)
    plain, _ = linear_of(kind, 64, 256, 7)
    biased, _ = linear_of(kind, 64, 256, 7, biases=[bias])
    x = torch.randn(5, 256)
    y = multiply(name, plain, x)
    assert torch.allclose(multiply(name, biased, x), y + bias, atol=1e-5)
    added = torch.ones(5, 64)
    native.multiply(name, False, plain.handle, x.data_ptr(), 5, added.data_ptr(), ADD)
    assert torch.equal(added, y + 1)
    gated = multiply(name, plain, x, GATED)
    pairs = y.view(5, 2, 2, 16)
    expected = torch.nn.functional.silu(pairs[:, :, 0]) * pairs[:, :, 1]
    assert torch.allclose(gated, expected.reshape(5, 32), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LONG])
def test_rows_are_read_back_as_they_were_packed(kind: str) -> None:
    linear, weight = linear_of(kind, 48, 64, 3)
    if kind in WITH_OFFSETS:  # a product and a sum, where the package may join them
        assert torch.allclose(linear.rows().double(), weight, rtol=1e-6, atol=2e-7)
    else:
        assert torch.equal(linear.rows().double(), weight)
    with pytest.raises(IndexError):
        native.read_row(linear.handle, 48, torch.empty(64).data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(max_examples=200)
@given(data=st.data())
def test_any_numbers_of_bfloat16_have_the_same_meaning_in_12_bits(
    dtype: torch.dtype, data: Any
) -> None:
    bits = data.draw(st.lists(st.integers(0, 2**16 - 1), min_size=32, max_size=32))
    spread = data.draw(st.integers(0, 20))  # exponents are as far apart as that, or as they like
    rows = np.array(bits, np.uint16)
    if spread:
        rows = (rows & 0x807F) | ((100 + (rows >> 7) % spread) << 7).astype(np.uint16)
    weight = torch.from_numpy(np.tile(rows, (16, 2)).view(np.int16)).view(torch.bfloat16).to(dtype)
    linear = PackedLinear([weight], 64, dtype=torch.bfloat16, compact=True)
    assert torch.equal(linear.rows().nan_to_num(1e9), weight.float().nan_to_num(1e9))
    if 0 < spread <= 15:
        assert linear.format is Format.B12
        assert linear.num_bytes < 0.85 * weight.nelement() * 2


def test_numbers_without_a_common_size_stay_in_16_bits() -> None:
    weight = 10.0 ** -torch.randint(0, 30, (64, 256), generator=torch.Generator().manual_seed(0))
    linear = PackedLinear([weight], 256, dtype=torch.bfloat16, compact=True)
    assert linear.format is Format.BFLOAT16


@pytest.mark.skipif(
    not any(map(has, NAMES, ["compact"] * len(NAMES))), reason="no kernels for it here"
)
@pytest.mark.parametrize("rows", [1, 3, 4, 13, 40])
def test_products_in_12_bits_are_those_of_bfloat16_to_the_bit(rows: int) -> None:
    weight, x = torch.randn(48, 320), torch.randn(rows, 320)
    weight[weight.abs() < 1e-3] = 0
    plain = PackedLinear([weight], 320, dtype=torch.bfloat16)
    compact = PackedLinear([weight], 320, dtype=torch.bfloat16, compact=True)
    assert compact.format is Format.B12
    assert compact.num_bytes < 0.8 * plain.num_bytes
    name = NAMES[-1]
    assert torch.equal(multiply(name, compact, x), multiply(name, plain, x))


def test_kernels_without_the_format_refuse_it() -> None:
    compact = PackedLinear([torch.randn(16, 32)], 32, dtype=torch.bfloat16, compact=True)
    with pytest.raises(ValueError, match="base has no products of this format"):
        multiply("base", compact, torch.randn(1, 32))


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("seed", range(5))
def test_of_long_blocks_only_scales_and_offsets_are_rounded(kind: str, seed: int) -> None:
    blocks, weight = blocks_of(kind, 32, 512, seed)
    kept = PackedLinear([blocks], 512, dtype=torch.float32).rows().double()
    # A block of 32 is its least number and multiples of a step, each within half a unit of a half.
    size = weight.view(32, 16, 32).abs().amax(-1, keepdim=True).expand(-1, -1, 32).reshape(32, 512)
    spread = 1 if kind == "Q6_K" else 3  # an offset may be larger than what it comes to
    assert ((kept - weight).abs() <= spread * 2.0**-11 * size + 32 * 2.0**-25).all()
    assert not torch.equal(kept, weight)


def test_parts_follow_each_other_or_take_turns() -> None:
    one, other = torch.randn(32, 64), torch.randn(32, 64)
    joined = PackedLinear([one, other], 64, dtype=torch.float32)
    turns = PackedLinear([one, other], 64, dtype=torch.float32, interleaved=True)
    x = torch.randn(3, 64)
    y = multiply("base", joined, x)
    expected = torch.stack((y[:, :32].view(3, 2, 16), y[:, 32:].view(3, 2, 16)), 2)
    assert torch.equal(multiply("base", turns, x), expected.reshape(3, 64))


@pytest.mark.parametrize("name", NAMES)
def test_a_last_tile_is_filled_up(name: str) -> None:
    weight, bias, x = torch.randn(21, 64), torch.randn(21), torch.randn(3, 64)
    linear = PackedLinear([weight], 64, dtype=torch.float32, biases=[bias])
    assert linear.num_outputs == 32
    y = multiply(name, linear, x)
    assert torch.allclose(y[:, :21], x @ weight.T + bias, atol=1e-5)


@pytest.mark.parametrize(("n", "k", "parts"), [(32, 48, 1), (0, 32, 1), (24, 64, 2)])
def test_what_cannot_be_cut_into_tiles_is_refused(n: int, k: int, parts: int) -> None:
    with pytest.raises(ValueError, match="cannot be cut into tiles"):
        PackedLinear([torch.zeros(n, k)] * parts, k, dtype=torch.float32, interleaved=parts > 1)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    return lambda name: monkeypatch.setenv("PALMETTE_KERNELS", name)


def test_the_environment_chooses_among_what_the_processor_can_run(chosen: Any) -> None:
    chosen("base")
    assert cpu.kernels_for(torch.float32) == cpu.kernels_for(torch.bfloat16) == "base"
    assert not cpu.multiplies_bfloat16()
    chosen("torch")
    assert cpu.kernels_for(torch.float32) is None
    chosen("abacus")
    with pytest.raises(InvalidRequest, match="PALMETTE_KERNELS is 'abacus'; this processor can"):
        cpu.kernels_for(torch.float32)


def test_float32_is_served_by_kernels_that_round_nothing() -> None:
    name = cpu.kernels_for(torch.float32)
    assert name is not None
    assert {native.takes(name, True, kind) for kind in Format} == {"float32"}
    assert not native.has_b12(name)

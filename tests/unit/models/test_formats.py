"""Numbers of eight and four bits: against the standards' tables, an emulation in numpy, and themselves."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from etude.models import formats
from etude.models.lowprecision import EXPERT_FORMATS, FP8, MXFP8, NVFP4, ExpertFormat

Floats = npt.NDArray[np.float32]
ALL = tuple(EXPERT_FORMATS.values())
BYTES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
LEAST = np.float32(2.0**-100)

each_format = pytest.mark.parametrize("form", ALL, ids=lambda form: form.name)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ── the standards' tables ───────────────────────────────────────────────────────────────────────────────────────────


def e4m3_value(code: int) -> float:
    """OCP MX v1.0 §5.3, in Python's numbers."""
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_every_e4m3_code_is_the_standards_number() -> None:
    values = formats.E4M3.unpack(BYTES.view(torch.float8_e4m3fn))
    expected = torch.tensor([e4m3_value(code) for code in range(256)])
    assert torch.equal(values.nan_to_num(nan=999.0), expected.nan_to_num(nan=999.0))
    finite = ~values.isnan()
    assert int(finite.sum()) == 254
    assert torch.equal(formats.E4M3.pack(values[finite]).view(torch.uint8), BYTES[finite])
    assert torch.equal(formats.E4M3.round(values[finite]), values[finite])


def test_every_e2m1_code_is_the_standards_number() -> None:
    table = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
    expected = torch.tensor([(table[code & 15], table[code >> 4]) for code in range(256)])
    values = formats.E2M1.unpack(BYTES.view(256, 1))
    assert torch.equal(values.view(torch.int32), expected.view(torch.int32))  # of both zeros too
    assert torch.equal(formats.E2M1.pack(values), BYTES.view(256, 1))
    assert torch.equal(formats.E2M1.round(values).view(torch.int32), values.view(torch.int32))


def test_every_e8m0_code_is_the_standards_number() -> None:
    codes = formats.Quantised(
        torch.full((256, 1, 1), 1.0).to(torch.float8_e4m3fn), BYTES.view(256, 1, 1).view(torch.float8_e8m0fnu), None
    )
    values = formats.dequantise(formats.from_codes(codes, formats.MXFP8), formats.MXFP8).flatten().tolist()
    assert values[:255] == [2.0 ** (code - 127) for code in range(255)]
    assert values[255] != values[255]


@pytest.mark.parametrize("exponent", [-126, -93, -92, -91, -1, 0, 1, 126, 127])
def test_a_block_of_mxfp8_has_the_scale_of_the_standard(exponent: int) -> None:
    block = torch.tensor([[[2.0**exponent * 1.25, -(2.0**exponent) * 1.75, 0.0]]])
    codes = formats.to_codes(formats.quantise(block, formats.MXFP8), formats.MXFP8)
    assert int(codes.scales_Moi.view(torch.uint8)) == max(exponent - 8, -100) + 127


# ── the same bits by another road ───────────────────────────────────────────────────────────────────────────────────


def nearest(y: Floats, positive: Floats) -> Floats:
    """The nearest of a type's positive numbers (ascending, by code), of two the even code: by bisection, in float32."""
    middles: Floats = (positive[:-1] + positive[1:]) / np.float32(2)
    size = np.abs(y)
    code = np.searchsorted(middles, size, side="left")
    tie = (code < len(middles)) & (size == middles[np.minimum(code, len(middles) - 1)])
    magnitudes: Floats = positive[code + (tie & (code % 2 == 1))]
    signed: Floats = np.copysign(magnitudes, y)
    return signed


E4M3_POSITIVE = np.array([e4m3_value(code) for code in range(127)], np.float32)
E2M1_POSITIVE = np.array(formats.E2M1_VALUES, np.float32)


def cut(scale: np.float32, bits: int) -> np.float32:
    """Truncate a scale that is not too small to ``bits`` significant bits."""
    pattern = int(max(scale, LEAST).view(np.uint32)) & -(2 ** (24 - bits))
    return np.float32(np.uint32(pattern).view(np.float32))


def scaled(values: Floats, scale: np.float32) -> Floats:
    product: Floats = values * scale
    return product


def emulated_block(name: str, x: Floats, outer: np.float32) -> Floats:
    """One block, from the definitions."""
    largest = np.float32(np.abs(x).max())
    if name == "fp8":
        scale = cut(largest / np.float32(448), 20)
        return scaled(nearest(x / scale, E4M3_POSITIVE), scale)
    if name == "mxfp8":
        exponent = int(np.frexp(largest)[1]) - 1 if largest else -149
        scale = np.float32(2.0 ** max(exponent - 8, -100))
        return scaled(nearest(x / scale, E4M3_POSITIVE), scale)
    needed = max(largest / np.float32(6) / outer, np.float32(2.0**-6))
    scale = nearest(np.array([needed]), E4M3_POSITIVE)[0] * outer
    return scaled(nearest(x / scale, E2M1_POSITIVE), scale)


def emulated(form: ExpertFormat, x_MOI: Floats) -> Floats:
    """Matrices in a format, block by block: float32 and nothing finer."""
    out, rows, columns = np.empty_like(x_MOI), form.blocks.rows, form.blocks.columns
    for matrix, rounded in zip(x_MOI, out, strict=True):
        outer = cut(np.float32(np.abs(matrix).max()) / np.float32(6 * 448), 18)
        for top in range(0, matrix.shape[0], rows):
            for left in range(0, matrix.shape[1], columns):
                place = slice(top, top + rows), slice(left, left + columns)
                rounded[place] = emulated_block(form.name, matrix[place], outer)
    return out


def random_bits(seed: int, shape: tuple[int, ...]) -> Floats:
    """Any finite float32, subnormal ones included; most rows stay within some binades, else all but one round to 0."""
    draw = np.random.default_rng(seed)
    patterns = draw.integers(0, 2**32, shape, dtype=np.uint32)
    middle = draw.integers(0, 254, (*shape[:-1], 1))
    exponents = np.clip(middle + draw.integers(-9, 10, shape), 0, 254).astype(np.uint32)
    anywhere = draw.random((*shape[:-1], 1)) < 0.1
    exponents = np.where(anywhere, np.minimum(patterns >> 23 & 255, 254), exponents).astype(np.uint32)
    combined = patterns & np.uint32(0x807FFFFF) | exponents << np.uint32(23)
    return np.asarray(combined, np.uint32).view(np.float32)


def by_torch(form: ExpertFormat, x_MOI: Floats) -> Floats:
    """The computation for devices other than a CPU."""
    values = formats.quantise(torch.from_numpy(x_MOI), form.blocks)
    return formats.dequantise(values, form.blocks).numpy()


def by_loop(form: ExpertFormat, x_MOI: Floats) -> Floats:
    """The computation for a CPU."""
    out = np.full_like(x_MOI, np.nan)
    form.loop(np.ascontiguousarray(x_MOI), out)
    return out


def assert_same_bits(actual: Floats, expected: Floats) -> None:
    differing = np.flatnonzero(actual.view(np.uint32) != expected.view(np.uint32))
    assert not len(differing), (actual.flat[differing[:4]], expected.flat[differing[:4]])


@pytest.mark.parametrize(("shape", "seed"), [((3000, 1, 160), 0), ((2, 300, 150), 1), ((5, 17, 7), 2)])
@each_format
def test_torch_and_the_loops_have_the_bits_of_an_emulation(
    form: ExpertFormat, shape: tuple[int, ...], seed: int
) -> None:
    x_MOI = random_bits(seed, shape)
    expected = emulated(form, x_MOI)
    assert_same_bits(by_torch(form, x_MOI), expected)
    assert_same_bits(by_loop(form, x_MOI), expected)


@pytest.mark.parametrize(
    ("element", "positive"), [(formats.E4M3, E4M3_POSITIVE), (formats.E2M1, E2M1_POSITIVE)], ids=["e4m3", "e2m1"]
)
def test_every_bit_pattern_is_rounded_to_the_nearest_even(element: formats.ElementFormat, positive: Floats) -> None:
    for seed in range(2):
        anything = random_bits(seed, (1, 1_000_000))[0]
        near = (np.random.default_rng(seed).standard_normal(1_000_000) * positive[-1] / 2).astype(np.float32)
        for y in (anything, near):
            assert_same_bits(element.round(torch.from_numpy(y)).numpy(), nearest(y, positive))


@each_format
def test_torch_and_the_loops_agree_on_millions_of_bit_patterns(form: ExpertFormat) -> None:
    for seed in range(2):
        x_MOI = random_bits(100 + seed, (2000, 1, 512))
        assert_same_bits(by_loop(form, x_MOI), by_torch(form, x_MOI))


HALFWAY = [
    (FP8, formats.E4M3, E4M3_POSITIVE),
    (MXFP8, formats.E4M3, E4M3_POSITIVE),
    (NVFP4, formats.E2M1, E2M1_POSITIVE),
]


@pytest.mark.parametrize(("form", "element", "positive"), HALFWAY, ids=lambda value: getattr(value, "name", ""))
def test_ties_go_to_the_even_code(form: ExpertFormat, element: formats.ElementFormat, positive: Floats) -> None:
    """Middles between neighbours, and numbers next to them; the largest numbers make every scale 2⁻²⁰."""
    middles = (positive[:-1] + positive[1:]) / np.float32(2)
    beside = [np.nextafter(middles, np.float32(end)) for end in (0, 1000)]
    y = np.concatenate([middles, *beside, -middles]).astype(np.float32)
    expected = nearest(y, positive)
    assert_same_bits(element.round(torch.from_numpy(y)).numpy(), expected)
    unit = np.float32(2.0**-20)
    blocks = np.zeros((len(y), 1, 32), np.float32)
    blocks[:, 0, 0], blocks[:, 0, 1] = y * unit, positive[-1] * unit
    if form is NVFP4:
        # Its first block has the scale 1, if another one has 448 and the token 2⁻²⁰.
        blocks[:, 0, 16] = 448 * positive[-1] * unit
    assert_same_bits(by_loop(form, blocks)[:, 0, 0], expected * unit)
    assert_same_bits(by_torch(form, blocks)[:, 0, 0], expected * unit)


@each_format
def test_who_flushes_subnormal_numbers_gets_the_same(form: ExpertFormat) -> None:
    x_MOI = random_bits(7, (2000, 1, 160))
    expected = by_torch(form, x_MOI)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        flushed = by_torch(form, x_MOI), by_loop(form, x_MOI)
    finally:
        torch.set_flush_denormal(False)
    for actual in flushed:
        assert_same_bits(actual, expected)


# ── what the formats promise ────────────────────────────────────────────────────────────────────────────────────────

matrices = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 20).map(lambda half: 2 * half)),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@settings(max_examples=60, deadline=None)
@given(x_MOI=matrices, form=st.sampled_from(ALL))
def test_codes_of_decoded_codes_are_the_same(x_MOI: Floats, form: ExpertFormat) -> None:
    first = formats.to_codes(formats.quantise(torch.from_numpy(x_MOI), form.blocks), form.blocks)
    decoded = formats.dequantise(formats.from_codes(first, form.blocks), form.blocks)
    again = formats.to_codes(formats.quantise(decoded, form.blocks), form.blocks)
    assert_same_codes(again, first)
    assert_same_bits(decoded.numpy(), by_loop(form, x_MOI))


@each_format
def test_codes_of_decoded_codes_are_the_same_for_many_bits(form: ExpertFormat) -> None:
    for seed, shape in enumerate([(1500, 1, 160), (4, 200, 140)]):
        first = formats.to_codes(formats.quantise(torch.from_numpy(random_bits(seed, shape)), form.blocks), form.blocks)
        decoded = formats.dequantise(formats.from_codes(first, form.blocks), form.blocks)
        assert_same_codes(formats.to_codes(formats.quantise(decoded, form.blocks), form.blocks), first)


def assert_same_codes(actual: formats.Quantised, expected: formats.Quantised) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def doubled(values: formats.Quantised) -> formats.Quantised:
    outer_M = None if values.outer_M is None else values.outer_M.double()
    return formats.Quantised(values.elements_MOI.double(), values.scales_Moi.double(), outer_M)


@each_format
def test_decoding_does_not_round(form: ExpertFormat) -> None:
    values = formats.quantise(torch.from_numpy(random_bits(3, (500, 1, 160))), form.blocks)
    exact = formats.dequantise(doubled(values), form.blocks)
    assert exact.dtype == torch.float64
    assert torch.equal(formats.dequantise(values, form.blocks).double(), exact)


@pytest.mark.parametrize(
    ("form", "relative", "absolute"),
    # Half a step of the mantissa, or of the subnormal numbers; mxfp8 cuts (448, 512) scales to 448.
    [(FP8, 2.0**-4, 2.0**-10 / 448), (MXFP8, 2.0**-3, 2.0**-10 / 256), (NVFP4, 0.2, 0.25 / 5.6)],
    ids=["fp8", "mxfp8", "nvfp4"],
)
def test_errors_are_half_a_step(form: ExpertFormat, relative: float, absolute: float) -> None:
    x_RI = torch.randn(400, form.blocks.columns, generator=torch.Generator().manual_seed(0))
    largest = x_RI.abs().amax(1, keepdim=True)
    error = (form.activation(x_RI) - x_RI).abs()
    assert bool((error <= torch.maximum(relative * x_RI.abs(), absolute * largest) * (1 + 1e-5)).all())
    assert float(error.max()) > 0


@each_format
def test_zeros_stay_zeros(form: ExpertFormat) -> None:
    x_RI = torch.tensor([[0.0, -0.0] * 40, [0.0, 1e-45] * 40])
    assert torch.equal(
        form.activation(x_RI).view(torch.int32), torch.tensor([[0.0, -0.0] * 40, [0.0] * 80]).view(torch.int32)
    )


@pytest.mark.parametrize("rounding", [by_torch, by_loop])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@each_format
def test_what_is_not_finite_poisons_its_block(
    form: ExpertFormat, bad: float, rounding: Callable[[ExpertFormat, Floats], Floats]
) -> None:
    x_MOI = np.ones((2, 1, 300), np.float32)
    x_MOI[1, 0, 140] = bad
    poisoned = np.isnan(rounding(form, x_MOI))
    columns = form.blocks.columns
    first, last = (0, 300) if form is NVFP4 else (140 // columns * columns, (140 // columns + 1) * columns)
    assert poisoned[1, 0, first:last].all()
    assert poisoned.sum() == last - first

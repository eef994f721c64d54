"""Stream version 1 against Random123, an independent numpy implementation, and the normal distribution."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from conditioned_kernels import coefficients, sampling
from conditioned_kernels.sampling import philox4x32, philox_normal, stream_key

from . import tolerances

pytestmark = pytest.mark.usefixtures("each_backend")

KEY = stream_key(0, "decoder.layers.0.attn.q_proj.weight", "q")
SAMPLES = 10_000_000
PINNED = "fe889e5dabbac191674e6aef455e897e6a749660fe49d22af3332053f53bea8b"


# The reference, from the text of sampling.py's docstring: numpy, no code shared with the package.


def numpy_philox(counter: np.ndarray, key: int) -> np.ndarray:
    """(4, n) uint64 holding 32-bit words -> (4, n)."""
    c = [word.astype(np.uint64) for word in counter]
    k = [np.uint64(key & 0xFFFFFFFF), np.uint64(key >> 32)]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [p1 >> shift ^ c[1] ^ k[0], p1 & low, p0 >> shift ^ c[3] ^ k[1], p0 & low]
        k = [k[0] + np.uint64(0x9E3779B9) & low, k[1] + np.uint64(0xBB67AE85) & low]
    return np.stack(c)


def numpy_horner(x: np.ndarray, coefficient: tuple[float, ...]) -> np.ndarray:
    total = np.full_like(x, coefficient[-1])
    for c in reversed(coefficient[:-1]):
        total = total * x + x.dtype.type(c)
    return total


def numpy_log(u: np.ndarray) -> np.ndarray:
    """float32 log on (0, 1], argument reduced by frexp."""
    f32 = np.float32
    mantissa, exponent = np.frexp(u)
    low = mantissa < np.uint32(coefficients.SQRT_HALF_BITS).view(f32)
    f = np.where(low, mantissa * f32(2), mantissa) - f32(1)
    e = (exponent - low).astype(f32)
    tail = numpy_horner(f, coefficients.LOG1P) * (f * (f * f))
    return tail + e * f32(coefficients.LN2_LOW) - f * f * f32(0.5) + f + e * f32(coefficients.LN2_HIGH)


def numpy_sine_cosine(t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    square = t * t
    sine = numpy_horner(square, coefficients.SIN_QUARTER) * t
    return sine, numpy_horner(square, coefficients.COS_QUARTER) * square + t.dtype.type(1)


def numpy_uniform(x0: np.ndarray) -> np.ndarray:
    return (x0 + np.uint64(1)).astype(np.float32) * np.float32(2.0**-32)


def numpy_quarter(x1: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    q = (x1 + np.uint64(1 << 29)) >> np.uint64(30)
    return q, (x1.astype(np.int64) - (q << np.uint64(30)).astype(np.int64)).astype(np.float32) * np.float32(2.0**-30)


def numpy_normals(x0: np.ndarray, x1: np.ndarray) -> np.ndarray:
    """(n, 2) float32."""
    radius = np.sqrt(np.float32(-2) * numpy_log(numpy_uniform(x0)))
    q, t = numpy_quarter(x1)
    sine, cosine = numpy_sine_cosine(t)
    s, c = sine * radius, cosine * radius
    turn = (q % np.uint64(4)).astype(int)
    return np.stack((np.choose(turn, (c, -s, -c, s)), np.choose(turn, (s, c, -s, -c))), -1)


def numpy_stream(key: int, heads: range, elements: range) -> np.ndarray:
    rows = []
    for head in heads:
        e = np.arange(elements.start, elements.stop, dtype=np.uint64)
        b = e // np.uint64(4)
        counter = np.stack((b & np.uint64(0xFFFFFFFF), b >> np.uint64(32), np.full_like(b, head), np.zeros_like(b)))
        x = numpy_philox(counter, key)
        four = np.concatenate((numpy_normals(x[0], x[1]), numpy_normals(x[2], x[3])), -1)
        rows.append(four[np.arange(len(e)), (e % np.uint64(4)).astype(int)])
    return np.stack(rows)


def bits(samples: torch.Tensor | np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(samples)).view(np.int32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_random123_known_answers(counter: str, key: str, expected: str) -> None:
    """The three philox4x32 vectors with 10 rounds of Random123's kat_vectors file."""
    words = [int(word, 16) for word in counter.split()]
    low, high = (int(word, 16) for word in key.split())
    out = philox4x32(tuple(torch.tensor([word]) for word in words), low | high << 32)
    assert [f"{int(word):08x}" for word in out] == expected.split()
    reference = numpy_philox(np.array(words, dtype=np.uint64)[:, None], low | high << 32)
    assert [f"{int(word):08x}" for word in reference[:, 0]] == expected.split()


def test_the_key_is_the_documented_hash() -> None:
    for seed, name, role in ((0, "", ""), (-3, "layer.0.ключ", "q"), (2**63, "a", "k.rope")):
        digest = hashlib.sha256(b"conditioned_kernels/1\0" + f"{seed}\0{name}\0{role}".encode()).digest()
        assert stream_key(seed, name, role) == int.from_bytes(digest[:8], "little")
    keys = {stream_key(s, n, r) for s in range(10) for n in ("a", "b", "ab") for r in ("", "q", "k")}
    assert len(keys) == 90


@pytest.mark.parametrize(
    ("heads", "elements"),
    [
        (range(5), range(40_003)),
        (range(7, 9), range(5, 2002)),
        (range(2**32 - 2, 2**32 - 1), range(1, 18)),
        (range(1), range(2**34 - 6, 2**34 + 6)),  # the counter's second word starts here
    ],
    ids=str,
)
def test_stream_equals_the_numpy_reference_bit_for_bit(heads: range, elements: range) -> None:
    assert np.array_equal(bits(philox_normal(KEY, heads, elements)), bits(numpy_stream(KEY, heads, elements)))


def test_every_quadrant_and_the_ends_of_both_intervals() -> None:
    edges = [0, 1, 2**29 - 1, 2**29, 2**30, 3 * 2**29, 2**31, 5 * 2**29, 3 * 2**30, 7 * 2**29, 2**32 - 2, 2**32 - 1]
    x0, x1 = (grid.reshape(-1) for grid in np.meshgrid(edges, edges))
    out = torch.empty(len(x0), 2)
    sampling._box_muller(torch.from_numpy(x0), torch.from_numpy(x1), out)
    assert np.array_equal(bits(out), bits(numpy_normals(x0.astype(np.uint64), x1.astype(np.uint64))))
    assert out.isfinite().all()


def test_stream_version_1_is_pinned() -> None:
    """A change of any digit of the stream changes every weight ever drawn, and must get a new version."""
    samples = philox_normal(stream_key(1, "pinned", "q"), range(2), range(1000))
    assert sampling.STREAM_VERSION == 1
    assert hashlib.sha256(samples.numpy().tobytes()).hexdigest() == PINNED


@given(st.integers(0, 20), st.integers(1, 4), st.integers(0, 60), st.integers(0, 60))
def test_a_part_is_that_part_of_the_whole(head: int, heads: int, start: int, length: int) -> None:
    whole = philox_normal(KEY, range(24), range(120))
    part = philox_normal(KEY, range(head, head + heads), range(start, start + length))
    assert torch.equal(part, whole[head : head + heads, start : start + length])
    assert part.is_contiguous()


def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = philox_normal(KEY, range(3), range(201))
    monkeypatch.setattr(sampling, "_BLOCK", 7)
    assert torch.equal(philox_normal(KEY, range(3), range(201)), whole)


def test_empty_ranges_and_bad_ranges() -> None:
    assert philox_normal(KEY, range(0), range(5)).shape == (0, 5)
    assert philox_normal(KEY, range(3), range(0)).shape == (3, 0)
    for heads, elements in ((range(0, 4, 2), range(4)), (range(2), range(0, 4, 2)), (range(-1, 2), range(4))):
        with pytest.raises(ValueError, match="step 1"):
            philox_normal(KEY, heads, elements)


@pytest.mark.usefixtures("untouched_rng")
def test_c01_an_ambient_device_does_not_leak_in() -> None:
    expected = philox_normal(KEY, range(2), range(9))
    with torch.device("meta"):
        assert torch.equal(philox_normal(KEY, range(2), range(9)), expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(philox_normal(KEY, range(2), range(9)), expected)
    finally:
        torch.set_default_dtype(torch.float32)


# The stated bounds of coefficients.py, re-measured in float64.


@pytest.mark.parametrize(
    ("low", "high", "function", "exact", "bound"),
    [
        (
            math.sqrt(0.5) - 1,
            math.sqrt(2) - 1,
            lambda f: f - f * f / 2 + f**3 * numpy_horner(f, coefficients.LOG1P),
            np.log1p,
            6.5e-9,
        ),
        (-0.5, 0.5, lambda t: numpy_sine_cosine(t)[0], lambda t: np.sin(math.pi / 2 * t), 3.5e-8),
        (-0.5, 0.5, lambda t: numpy_sine_cosine(t)[1], lambda t: np.cos(math.pi / 2 * t), 1.1e-8),
    ],
    ids=["log1p", "sine", "cosine"],
)
def test_polynomial_bounds(low: float, high: float, function, exact, bound: float) -> None:
    x = np.linspace(low, high, 400_000)
    x = x[np.abs(x) > 1e-6]
    error = np.abs(function(x) / exact(x) - 1).max()
    assert 0.9 * bound < error <= bound  # true, and not idle


def test_ln2_is_split_so_that_the_high_part_times_an_exponent_is_exact() -> None:
    assert np.float32(coefficients.LN2_HIGH) == coefficients.LN2_HIGH
    assert coefficients.LN2_HIGH * 2**9 % 1 == 0
    assert abs(coefficients.LN2_HIGH + coefficients.LN2_LOW - math.log(2)) < 2.0**-37
    assert np.uint32(coefficients.SQRT_HALF_BITS).view(np.float32) == np.float32(math.sqrt(0.5))


def ulps(computed: np.ndarray, exact: np.ndarray) -> float:
    """Largest error in units of the last place of the float32 nearest to the exact value."""
    return float((np.abs(computed.astype(np.float64) - exact) / np.spacing(np.abs(exact).astype(np.float32))).max())


def test_logarithm_sine_and_cosine_are_within_two_ulp() -> None:
    """Every float32 of [1/2, 1], where the logarithm loses most, and the rest by sampling."""
    every = np.arange(np.float32(0.5).view(np.int32), np.float32(1).view(np.int32), dtype=np.int32).view(np.float32)
    smaller = np.exp2(-np.linspace(0, 32, 500_001)).astype(np.float32)[1:]
    for u in (every, smaller):
        log = numpy_log(u)
        assert (log < 0).all()
        assert ulps(log, np.log(u.astype(np.float64))) <= 2
    t = np.linspace(-0.5, 0.5, 2_000_001).astype(np.float32)
    t = t[t != 0]
    for computed, exact in zip(numpy_sine_cosine(t), (np.sin, np.cos), strict=True):
        assert ulps(computed, exact(math.pi / 2 * t.astype(np.float64))) <= 2


def test_a_sample_is_within_five_ulp_of_the_exact_transform() -> None:
    generator = np.random.default_rng(0)
    x0, x1 = generator.integers(0, 2**32, (2, 1_000_000), dtype=np.uint64)
    q, t = numpy_quarter(x1)
    radius = np.sqrt(-2 * np.log(numpy_uniform(x0).astype(np.float64)))
    angle = math.pi / 2 * t.astype(np.float64)
    turn = (q % np.uint64(4)).astype(int)
    s, c = np.sin(angle), np.cos(angle)
    exact = np.stack((np.choose(turn, (c, -s, -c, s)), np.choose(turn, (s, c, -s, -c))), -1) * radius[:, None]
    keep = (exact != 0).all(-1)
    assert ulps(numpy_normals(x0, x1)[keep], exact[keep]) <= 5


# The distribution.


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    return philox_normal(KEY, range(10), range(SAMPLES // 10)).numpy().reshape(-1).astype(np.float64)


def test_moments(normals: np.ndarray) -> None:
    """Mean, variance, skewness and kurtosis against 0, 1, 0, 3, each with its standard error."""
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        measured = (normals**power).mean()
        assert abs(measured - moment) <= tolerances.sampling(math.sqrt(variance / SAMPLES))


def test_tails_and_reach(normals: np.ndarray) -> None:
    magnitude = np.abs(normals)
    for level in (1.0, 2.0, 3.0, 4.0, 5.0):
        p = 2 * stats.norm.sf(level)
        count = int((magnitude > level).sum())
        assert abs(count - p * SAMPLES) <= tolerances.sampling(math.sqrt(p * SAMPLES)) + 1
    reach = math.sqrt(64 * math.log(2))
    assert magnitude.max() <= reach * (1 + tolerances.eps(torch.float32))
    out = torch.empty(1, 2)
    sampling._box_muller(torch.tensor([0]), torch.tensor([0]), out)
    assert float(out[0, 0]) == pytest.approx(reach, rel=1e-6)  # reached, by the smallest u
    assert stats.norm.sf(6.66) * 2 == pytest.approx(1 / 3.6e10, rel=0.05)


def test_kolmogorov_smirnov(normals: np.ndarray) -> None:
    ordered = special.ndtr(np.sort(normals))
    grid = np.arange(SAMPLES + 1) / SAMPLES
    distance = max((grid[1:] - ordered).max(), (ordered - grid[:-1]).max())
    # The limit law's 0.1 % point is 1.95 / sqrt(n).
    assert distance * math.sqrt(SAMPLES) < 1.95


def test_neighbours_heads_and_keys_are_uncorrelated(normals: np.ndarray) -> None:
    other = philox_normal(stream_key(1, "decoder.layers.0.attn.q_proj.weight", "q"), range(1), range(SAMPLES // 10))
    first, second = normals[: SAMPLES // 10], normals[SAMPLES // 10 : SAMPLES // 5]
    pairs = [(normals[:-lag], normals[lag:]) for lag in (1, 2, 3, 4)]
    pairs += [(first, second), (first, other.numpy()[0].astype(np.float64)), (first[::2] ** 2, first[1::2] ** 2)]
    for a, b in pairs:
        assert abs(np.corrcoef(a, b)[0, 1]) <= tolerances.sampling(1 / math.sqrt(len(a)))

"""The compiled ops: numerics against float64 LAPACK, certificates, registration, wiring, and bad libraries."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import conditioned_kernels as ck
from conditioned_kernels import _backend, _extension, _ops, _torch, build, sampling

from .extension_build import compile_test, ready

ROOT = Path(ck.__file__).parent.parent
WORK = (torch.float32, torch.float64)
SIZES = (1, 2, 7, 31, 64, 127)


@pytest.fixture(scope="session", autouse=True)
def _library() -> None:
    if reason := ready():
        pytest.skip(f"no extension: {reason}")


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """LAPACK on many tiny matrices loses more to waiting threads than it gains, on a busy machine most of all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def orthogonal(b: int, n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(b, n, n, dtype=torch.float64, generator=generator))[0]


def spectra(n: int) -> dict[str, torch.Tensor]:
    """Eigenvalues of Gram matrices, by name."""
    even = torch.linspace(0, 1, n, dtype=torch.float64) if n > 1 else torch.zeros(1, dtype=torch.float64)
    families = {f"geometric 1e-{k}": 10.0 ** (-k * even) for k in range(7)}
    families["clustered"] = 0.9 + 0.1 * even
    families["repeated"] = torch.where(even < 0.5, 1.0, 4.0).double()
    families["one outlier"] = torch.where(even < 1, 1.0, 100.0).double()
    return families


def gram_of(eigenvalues: torch.Tensor, b: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q = orthogonal(b, len(eigenvalues), generator)
    gram = (q * eigenvalues) @ q.mT
    return ((gram + gram.mT) / 2).to(dtype)


# ---- sampling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "elements"),
    [
        (range(3), range(4096)),
        (range(2, 5), range(7, 70_003)),
        (range(1), range(4 * 2**32 - 5, 4 * 2**32 + 777)),
        (range(2**32 - 2, 2**32), range(300)),
        (range(5, 6), range(2, 3)),
        (range(0), range(5)),
        (range(2), range(3, 3)),
    ],
)
def test_samples_equal_the_reference_bit_for_bit(heads: range, elements: range) -> None:
    for key in (0, 1, 2**63 + 5, 2**64 - 1, sampling.stream_key(3, "layer.weight", "q")):
        expected = sampling.philox_normal(key, heads, elements, backend="torch")
        got = sampling.philox_normal(key, heads, elements, backend="extension")
        assert torch.equal(got.view(torch.int32), expected.view(torch.int32))


def test_samples_do_not_depend_on_the_thread_count() -> None:
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(sampling.philox_normal(9, range(3), range(1, 50_002), backend="extension"))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_instruction_sets_give_the_same_bits(tmp_path: Path) -> None:
    """A processor without AVX2, or another architecture, draws the same samples."""
    variants = build.INSTRUCTION_SETS.get(platform.machine(), {"baseline": ()})
    results = []
    for name, flags in variants.items():
        define = (f"-DCK_ISA=samples_{name}_code", f"-DCK_TABLE=samples_{name}", f"-DCK_HAS_{name.upper()}")
        library = ctypes.CDLL(
            str(
                compile_test(
                    "samples.cpp",
                    f"samples_{name}.so",
                    *build.CXX_FLAGS,
                    "-shared",
                    "-ffp-contract=off",
                    *define,
                    *flags,
                )
            )
        )
        out = np.empty(100_003, dtype=np.float32)
        library.draw(
            ctypes.c_uint64(77), ctypes.c_int64(5), out.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(out))
        )
        results.append(out)
    expected = sampling.philox_normal(77, range(1), range(5, 100_008), backend="torch")[0].numpy()
    for out in results:
        assert np.array_equal(out.view(np.int32), expected.view(np.int32))


def test_box_muller_equals_the_reference_at_the_edges_of_its_bits() -> None:
    edges = [0, 1, 2, 2**16 - 1, 2**16, 2**29 - 1, 2**29, 2**30, 2**31 - 1, 2**31, 3 * 2**30, 2**32 - 2**29]
    edges += [2**32 - 2**29 - 1, 2**32 - 129, 2**32 - 2, 2**32 - 1, 3037000499, 3037000500]
    generator = np.random.default_rng(0)
    radius, angle = (np.array([*edges, *generator.integers(0, 2**32, 4000)], dtype=np.int64) for _ in range(2))
    generator.shuffle(angle[len(edges) :])
    radius, angle = np.repeat(radius, 20), np.tile(angle, 20)
    out = torch.empty(len(radius), 2)
    sampling._box_muller(torch.from_numpy(radius), torch.from_numpy(angle), out)
    library = ctypes.CDLL(
        str(compile_test("box_muller.cpp", "box_muller.so", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off"))
    )
    got = np.empty((len(radius), 2), dtype=np.float32)
    words = np.stack((radius, angle), 1).astype(np.uint32)
    library.box_muller_pairs(
        words.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(words)), got.ctypes.data_as(ctypes.c_void_p)
    )
    assert np.array_equal(got.view(np.int32), out.numpy().view(np.int32))


# ---- Gram matrices ----------------------------------------------------------------------------------------------

GRAM_ROWS = (1, 3, 17, 63, 64, 65, 80, 128, 200)
GRAM_COLS = (1, 7, 8, 9, 31, 127, 128, 129, 768, 2049)


def layouts(w: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same (b, r, c) values with contiguous columns, contiguous rows, and neither."""
    b, r, c = w.shape
    apart = torch.full((b, r + 1, 2 * c + 3), torch.nan, dtype=w.dtype)
    apart[:, 1:, 3::2] = w
    head = torch.full((b, r, c + 5), torch.nan, dtype=w.dtype)
    head[:, :, 5:] = w
    return {
        "columns": w.contiguous(),
        "columns, offset": head[:, :, 5:],
        "rows": w.mT.contiguous().mT,
        "heads side by side": w.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "strided": apart[:, 1:, 3::2],
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, *WORK])
@pytest.mark.parametrize("rows", GRAM_ROWS)
def test_gram_is_within_its_bound_over_sizes_and_strides(rows: int, dtype: torch.dtype) -> None:
    """Element by element, k u |W||W|^T with the k that the brackets rest on."""
    generator = torch.Generator().manual_seed(rows)
    for cols in GRAM_COLS:
        w = (1 + torch.rand(2, rows, cols, dtype=torch.float64, generator=generator)).to(dtype)
        w[1] = torch.randn(rows, cols, generator=generator).to(dtype)
        exact = w.double() @ w.double().mT
        sizes = w.double().abs() @ w.double().abs().mT
        own = 2 * cols * unit(torch.float64)  # the float64 product's
        work = _torch.work_dtype(dtype)
        for (name, view), products, result in itertools.product(layouts(w).items(), WORK, WORK):
            products, result = (max(each, work, key=lambda d: d.itemsize) for each in (products, result))
            gram = _ops.gram(view, products == torch.float64, result == torch.float64)
            assert gram.dtype == result and gram.is_contiguous() and torch.equal(gram, gram.mT), (cols, name)
            terms = _ops.gram_terms(rows, cols, products, result)
            allowed = (1.01 * terms * unit(result) + own) * sizes
            assert ((gram.double() - exact).abs() <= allowed).all(), (cols, name, products, result)


@pytest.mark.parametrize("cols", [1, 9, 257, 768, 5000])
@pytest.mark.parametrize("rows", [24, 72, 136])
def test_gram_eigenvalues_are_within_their_bound(rows: int, cols: int) -> None:
    """All signs equal: rounding errors add up as they do nowhere else, and the trace is close to the norm."""
    w = 1 + 1e-3 * torch.rand(4, rows, cols, generator=torch.Generator().manual_seed(0))
    for view in layouts(w).values():
        exact = torch.linalg.eigvalsh(view.double() @ view.double().mT)
        for work in WORK:
            gram, terms = _ops.small_matrix("extension", view).gram_terms(view, work)
            error = (torch.linalg.eigvalsh(gram.double()) - exact).abs().amax(-1)
            assert (error <= _torch.gram_rounding(gram, terms).double() + 1e-13 * exact[:, -1]).all()


def test_gram_keeps_nan_and_infinity_where_they_are() -> None:
    for bad in (torch.nan, torch.inf):
        for row, col in ((0, 0), (16, 70), (4, 31)):
            w = torch.rand(3, 17, 71) + 0.5
            w[1, row, col] = bad
            for view in layouts(w).values():
                gram = _ops.gram(view)
                touched = torch.zeros(3, 17, 17, dtype=torch.bool)
                touched[1, row] = touched[1, :, row] = True
                assert torch.equal(gram.isfinite(), ~touched)


@pytest.mark.parametrize("dtype", WORK)
def test_gram_does_not_depend_on_threads_or_batch(dtype: torch.dtype) -> None:
    w = torch.randn(7, 33, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = torch.get_num_threads()
    try:
        for view in layouts(w).values():
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(_ops.gram(view))
            assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
            assert torch.equal(results[0], torch.cat([_ops.gram(view[i : i + 1]) for i in range(7)]))
    finally:
        torch.set_num_threads(before)


def test_gram_of_nothing_and_of_broadcast_rows() -> None:
    assert _ops.gram(torch.empty(0, 4, 9)).shape == (0, 4, 4)
    assert _ops.gram(torch.empty(2, 0, 9)).shape == (2, 0, 0)
    assert torch.equal(_ops.gram(torch.empty(2, 3, 0)), torch.zeros(2, 3, 3))
    assert torch.equal(_ops.gram(torch.empty(2, 0, 3).mT), torch.zeros(2, 3, 3))
    assert torch.equal(_ops.gram(torch.ones(1, 1, 5).expand(2, 3, 5)), torch.full((2, 3, 3), 5.0))
    assert torch.equal(_ops.gram(torch.ones(1, 3, 1).expand(2, 3, 5)), torch.full((2, 3, 3), 5.0))


# ---- products ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 17, 64, 130])
@pytest.mark.parametrize("dtype", [torch.bfloat16, *WORK])
def test_product_is_within_its_bound_over_sizes_and_strides(dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    work = _torch.work_dtype(dtype)
    for cols in (1, 7, 96, 97, 300):
        w = torch.randn(2, rows, cols, dtype=torch.float64, generator=generator).to(dtype)
        f = torch.randn(2, rows, rows, dtype=torch.float64, generator=generator)
        for (name, view), (target, out), wide in itertools.product(
            layouts(w).items(), layouts(torch.zeros_like(w, dtype=work)).items(), (False, True)
        ):
            factor = f.to(torch.float64 if wide else work)
            exact, sizes = factor.double() @ w.double(), factor.double().abs() @ w.double().abs()
            _ops.product_(out, factor, view)
            allowed = (1.01 * (rows + 1) * unit(factor.dtype) + 2 * rows * unit(torch.float64)) * sizes
            assert ((out.double() - exact).abs() <= allowed + unit(work) * exact.abs()).all(), (
                cols,
                name,
                target,
                wide,
            )


def test_product_in_place_and_beside_nan() -> None:
    w, f = torch.randn(3, 20, 333), torch.randn(3, 20, 20)
    for view in layouts(w).values():
        expected, same = torch.empty_like(view), view.clone()
        _ops.product_(expected, f, same)
        _ops.product_(same, f, same)
        assert torch.equal(same, expected)
    w[1, 4, 50] = torch.nan
    out = torch.empty_like(w)
    _ops.product_(out, f, w)
    broken = torch.zeros(3, 20, 333, dtype=torch.bool)
    broken[1, :, 50] = True
    assert torch.equal(out.isnan(), broken)


# ---- factors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", WORK)
@pytest.mark.parametrize("method", ["polar", "qr"])
def test_factor_orthonormalizes_over_sizes_and_spectra(method: str, dtype: torch.dtype) -> None:
    for n in SIZES:
        for name, values in spectra(n).items():
            gram = gram_of(values, 3, dtype)
            factor, residual, status = _ops.gram_factor(gram, method)
            wide = factor.double()
            got = wide @ (gram.triu().double() + gram.triu(1).mT.double()) @ wide.mT
            error = (got - torch.eye(n, dtype=torch.float64)).abs().amax((-2, -1))
            given = error.isfinite()
            # The residual is what was measured, and the status is what it says.
            assert torch.equal(given, residual.isfinite())
            kappa = float(values.max() / values.min())
            noise = 4 * n * unit(dtype) * kappa * (1 + error)
            assert ((residual - error).abs() <= noise)[given & (error < 1e-2)].all(), (n, name)
            assert torch.equal(status == 0, residual <= 16 * unit(dtype)), (n, name)
            if values.max() <= 10 * values.min():
                # In float64 the measurement's own rounding is of the size of the tolerance.
                hard = method == "qr" or dtype == torch.float64
                assert (status == 0).all() or hard, (n, name, float(error.max()))
                assert (error <= 2 * n * unit(dtype) + 32 * unit(dtype)).all(), (n, name, float(error.max()))
            if method == "qr" and values.max() * n * unit(dtype) < 1e-2 * values.min():
                exact = torch.linalg.inv(torch.linalg.cholesky(gram.double()))
                assert ((wide - exact).abs() <= 4 * n * unit(dtype) * kappa * exact.abs().max()).all(), (n, name)
            if method == "qr":
                assert torch.equal(factor, factor.tril())


def test_polar_factor_of_a_gaussian_head_is_as_good_as_torch_s() -> None:
    """Within 8 eps after the product with W at usual widths; the Gram matrix itself costs more than that at 128."""
    for n in (16, 32, 64, 96, 128):
        w = torch.randn(8, n, 12 * n, generator=torch.Generator().manual_seed(n))
        gram = w @ w.mT
        factor, _, status = _ops.gram_factor(gram, "polar")
        assert (status == 0).all()
        torch_s = _torch.orthogonality_residual(_torch.factor(gram, "polar") @ w).max()
        allowed = max(1.25 * float(torch_s), _torch.residual_tolerance(torch.float32))
        assert _torch.orthogonality_residual(factor @ w).max() <= allowed, n


@pytest.mark.parametrize("method", ["polar", "qr"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_factor_follows_the_scale(method: str, scale: float) -> None:
    gram = gram_of(1 + torch.arange(24.0).double() / 8, 2, torch.float64)
    one = _ops.gram_factor(gram.float(), method)[0].double()
    scaled = _ops.gram_factor((gram * scale).float(), method)[0].double()
    assert torch.allclose(scaled * scale**0.5, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["polar", "qr"])
def test_factor_status_of_bad_matrices_leaves_the_others_alone(method: str) -> None:
    """Field reports A12 and A19: a bad matrix is flagged alone."""
    good = gram_of(torch.tensor([1.0, 2.0, 3.0]).double(), 1, torch.float32)[0]
    singular = torch.ones(3, 3)
    nan, inf = good.clone(), good.clone()
    nan[0, 1] = nan[1, 0] = torch.nan
    inf[2, 2] = torch.inf
    batch = torch.stack((good, torch.zeros(3, 3), nan, inf, -good, good))
    factor, _, status = _ops.gram_factor(batch, method)
    assert status.tolist() == [0, 3, 4, 4, 1, 0]
    assert torch.equal(factor[0], factor[5]) and factor[0].isfinite().all()
    assert factor[1:5].isnan().all()
    assert _ops.gram_factor(singular[None], method)[2].item() != 0 or method == "qr"


def test_factor_reads_any_strides_and_writes_nothing() -> None:
    gram = gram_of(torch.linspace(1, 2, 20).double(), 6, torch.float32)
    plain = _ops.gram_factor(gram, "polar")[0]
    parent = torch.zeros(6, 45, 41)
    parent[:, 2:42:2, 1:21] = gram
    before = parent.clone()
    assert torch.equal(_ops.gram_factor(parent[:, 2:42:2, 1:21], "polar")[0], plain)
    assert torch.equal(_ops.gram_factor(gram.flip(0).flip(0), "polar")[0], plain)
    assert torch.equal(parent, before)
    assert torch.equal(_ops.gram_factor(gram[::2], "qr")[0], _ops.gram_factor(gram, "qr")[0][::2])


def test_batched_equals_one_by_one() -> None:
    """Field report A07."""
    for b in (1, 2, 7, 33):
        gram = gram_of(torch.linspace(1, 3, 17).double(), b, torch.float32)
        together = _ops.gram_factor(gram, "polar")[0]
        assert torch.equal(together, torch.cat([_ops.gram_factor(g[None], "polar")[0] for g in gram]))
        error = torch.full((b,), 1e-6, dtype=torch.float64)
        bounds = _ops.spectrum_bracket(gram, error, 1e-3, 17)[0]
        assert torch.equal(bounds, torch.cat([_ops.spectrum_bracket(g[None], error[:1], 1e-3, 17)[0] for g in gram]))


# ---- brackets ---------------------------------------------------------------------------------------------------


def check_bracket(gram: torch.Tensor, rtol: float, steps: int, start: torch.Tensor | None = None) -> tuple:
    """Runs the op with no Gram error and checks what it promises against eigvalsh in float64."""
    b, n, _ = gram.shape
    bounds, vectors, taken, status = _ops.spectrum_bracket(gram, torch.zeros(b).double(), rtol, steps, start)
    # The upper triangle defines the matrix.
    symmetric = gram.triu().double() + gram.triu(1).mT.double()
    values = torch.linalg.eigvalsh(symmetric)
    low, high = values[:, 0], values[:, -1]
    noise = 1e-14 * n * high  # eigvalsh's own
    assert (bounds[:, 1] <= high + noise).all() and (high - noise <= bounds[:, 2]).all()
    assert (bounds[:, 4] <= low + noise).all() and (low - noise <= bounds[:, 5]).all()
    done = status == 0
    width = (bounds[:, 2] * bounds[:, 5] / (bounds[:, 1] * bounds[:, 4])).sqrt() - 1
    assert (width[done] <= rtol * (1 + 1e-9)).all()
    assert (taken <= steps).all()
    assert torch.allclose(vectors.double().norm(dim=-1), torch.ones(1).double(), atol=1e-5)
    return bounds, vectors, taken, status


@pytest.mark.parametrize("dtype", WORK)
def test_bracket_holds_over_sizes_and_spectra(dtype: torch.dtype) -> None:
    for n in SIZES:
        for name, values in spectra(n).items():
            kappa = float(values.max() / values.min())
            for rtol in (1e-3, 1e-1):
                _, _, _, status = check_bracket(gram_of(values, 3, dtype), rtol, n)
                if kappa * unit(dtype) * n < 1e-3 * rtol:
                    assert (status == 0).all(), (n, name, rtol)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_bracket_holds_when_steps_run_out(steps: int) -> None:
    values = 10.0 ** torch.linspace(-4, 0, 64).double()
    check_bracket(gram_of(values, 8, torch.float32), 1e-3, steps)


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e20, 1e30])
def test_bracket_follows_the_scale(scale: float) -> None:
    """Field report F01: no overflow, whatever the units."""
    gram = gram_of(torch.linspace(1, 9, 33).double(), 4, torch.float32)
    bounds = check_bracket((gram.double() * scale).float(), 1e-3, 33)[0]
    assert torch.allclose(bounds / scale, check_bracket(gram, 1e-3, 33)[0], rtol=1e-5)


def test_ten_thousand_random_matrices_lie_in_their_brackets() -> None:
    """kappa from the float64 SVD of W, the Gram matrix and everything else in float32."""
    generator = torch.Generator().manual_seed(0)
    total = converged = 0
    for n, m, count in ((4, 4, 4000), (8, 24, 3000), (16, 20, 1500), (24, 96, 1000), (32, 32, 400), (64, 128, 100)):
        w = torch.randn(count, n, m, generator=generator)
        w *= 10.0 ** (2 * torch.rand(count, n, 1, generator=generator) * torch.rand(count, 1, 1, generator=generator))
        gram, terms = _torch.gram_blocked(w)
        delta = _torch.gram_rounding(gram, terms).double()
        rtol = 1e-2
        bounds, _, _, status = _ops.spectrum_bracket(gram, delta, rtol, n)
        singular = torch.linalg.svdvals(w.double())
        kappa = singular[:, 0] / singular[:, -1]
        low = (bounds[:, 1] / bounds[:, 5]).sqrt()
        high = (bounds[:, 2] / bounds[:, 4]).sqrt()
        assert (low <= kappa * (1 + 1e-12)).all() and (kappa <= high * (1 + 1e-12)).all()
        assert (high / low <= (1 + rtol) * (1 + 1e-9))[status == 0].all()
        total += count
        converged += int((status == 0).sum())
    assert total == 10_000
    assert converged > 4_000  # float32 Gram matrices certify the well-conditioned ones only


def test_flat_spectrum_is_bracketed_not_underestimated() -> None:
    """Field report F04: singular values 0.9 to 1.0, where power iteration is 2% low after 15 steps."""
    values = torch.linspace(0.9, 1.0, 64).double() ** 2
    bounds, _, _, status = check_bracket(gram_of(values, 8, torch.float32), 1e-3, 64)
    assert (status == 0).all()
    assert (bounds[:, 0].sqrt() - 1).abs().max() < 1e-5


@pytest.mark.parametrize("flip", [(), (1,)])
def test_start_vectors_without_the_answer_do_not_mislead(flip: tuple[int, ...]) -> None:
    """Field report F03: a start orthogonal to the answer is found out by the proof, and leads on."""
    gram = torch.diag(torch.tensor([100.0, 1.0, 1.0, 4.0, 4.0, 9.0, 2.0, 3.0]))[None]
    start = torch.zeros(1, 2, 8)
    start[0, 0, 3] = start[0, 1, 4] = 1
    start = start.flip(flip)
    bounds, _, _, status = check_bracket(gram, 1e-3, 8, start)
    assert status.item() == 0
    assert abs(bounds[0, 0].item() - 100) < 0.1 and abs(bounds[0, 3].item() - 1) < 1e-3
    again = check_bracket(gram, 1e-3, 8, start)[0]
    assert torch.equal(bounds, again)
    for bad in (torch.nan, torch.inf, 0.0):
        check_bracket(gram, 1e-3, 8, torch.full((1, 2, 8), bad))


def test_giving_up_takes_few_steps_and_keeps_the_bracket() -> None:
    """Only what no bracket of rtol can hold is given up."""
    hard = gram_of(10.0 ** torch.linspace(-6, 0, 64).double(), 4, torch.float32)
    easy = gram_of(torch.linspace(1, 3, 64).double(), 4, torch.float32)
    gram = torch.cat((hard, easy))
    error = 1e-6 * gram.diagonal(dim1=-2, dim2=-1).sum(-1).double()
    bounds, _, steps, status = _ops.spectrum_bracket(gram, error, 1e-3, 64, give_up=True)
    values = torch.linalg.eigvalsh(gram.double())
    assert (bounds[:, 1] <= values[:, -1] + error).all() and (values[:, -1] - error <= bounds[:, 2]).all()
    assert (bounds[:, 4] <= values[:, 0] + error).all() and (values[:, 0] - error <= bounds[:, 5]).all()
    assert (status[:4] == 1).all() and (status[4:] == 0).all()
    assert (steps[:4] < 24).all()
    assert torch.equal(bounds[4:], _ops.spectrum_bracket(easy, error[4:], 1e-3, 64)[0])


def test_warm_start_saves_steps() -> None:
    w = torch.randn(16, 64, 768, generator=torch.Generator().manual_seed(0))
    cold = check_bracket(w @ w.mT, 1e-3, 64)
    moved = w + 1e-3 * torch.randn(16, 64, 768, generator=torch.Generator().manual_seed(1))
    warm = check_bracket(moved @ moved.mT, 1e-3, 64, cold[1])
    assert (cold[3] == 0).all() and (warm[3] == 0).all()
    assert warm[2].double().mean() < 0.6 * cold[2].double().mean()


def test_bracket_status_of_bad_matrices() -> None:
    """Field reports A18 and A19."""
    good = torch.diag(torch.tensor([1.0, 2.0]))
    nan = good.clone()
    nan[0, 1] = torch.nan
    batch = torch.stack((good, torch.zeros(2, 2), nan, torch.ones(2, 2), good * torch.inf))
    bounds, _, _, status = _ops.spectrum_bracket(batch, torch.zeros(5).double(), 1e-3, 2)
    assert status.tolist() == [0, 3, 4, 1, 4]
    assert bounds[3, 4] == 0 and bounds[3, 1] <= 2 <= bounds[3, 2]
    assert bounds[1].eq(0).all() and bounds[2].isnan().all()


# ---- registration -----------------------------------------------------------------------------------------------


def test_opcheck_of_every_op() -> None:
    """Field report E19."""
    gram = gram_of(torch.linspace(1, 2, 6).double(), 4, torch.float32)
    native = _ops.native()
    weights = torch.randn(2, 3, 5, 9)
    calls = (
        (native.gram.default, (weights[0],)),
        (native.gram.default, (weights[0].double().mT,)),
        (native.gram.default, (weights[0].bfloat16(), True, True)),
        (native.product_.default, (torch.empty(3, 5, 9), torch.randn(3, 5, 5).double(), weights[0])),
        (native.gram_factor.default, (gram, "polar")),
        (native.gram_factor.default, (gram.double().mT, "qr")),
        (native.spectrum_bracket.default, (gram, torch.zeros(4).double(), 1e-3, 6)),
        (native.spectrum_bracket.default, (gram, torch.zeros(4).double(), 1e-3, 6, torch.randn(4, 2, 6), True)),
        (native.philox_normal_.default, (torch.empty(2, 70), 1, 2, 3)),
        (torch.ops.conditioned_kernels.orthogonal_factor.default, (weights, "polar", "auto", False, "raise")),
        (torch.ops.conditioned_kernels.condition_number.default, (weights, 1e-3, "auto")),
    )
    for op, arguments in calls:
        torch.library.opcheck(op, arguments)


@pytest.mark.parametrize("backend", ["torch", "extension"])
def test_vmap_and_fullgraph_compile(backend: str) -> None:
    """Field report E19."""
    w = torch.randn(3, 5, 8, 32, generator=torch.Generator().manual_seed(0))
    plain = ck.condition_number(w, backend=backend)

    def kappa(x: torch.Tensor) -> ck.ConditionEstimate:
        return ck.condition_number(x, backend=backend)

    assert torch.equal(torch.vmap(torch.vmap(kappa))(w).kappa, plain.kappa)
    assert torch.equal(torch.vmap(kappa, in_dims=1)(w).high, plain.high.T)
    q = torch.vmap(lambda x: ck.orthogonalize(x, backend=backend), in_dims=1, out_dims=1)(w)
    assert torch.equal(q, ck.orthogonalize(w, backend=backend))

    def both(x: torch.Tensor) -> tuple[ck.ConditionEstimate, torch.Tensor, ck.Certificate]:
        return kappa(x), *ck.certify(x, backend=backend)

    torch.compiler.reset()
    estimate, q, certificate = torch.compile(both, fullgraph=True, backend="eager")(w)
    assert torch.equal(estimate.kappa, plain.kappa)
    assert torch.equal(q, ck.orthogonalize(w, backend=backend))
    assert certificate.status.eq(0).all()


def test_vmap_of_the_compiled_ops() -> None:
    gram = gram_of(torch.linspace(1, 2, 6).double(), 12, torch.float32)
    native = _ops.native()
    w = torch.randn(4, 3, 6, 9)
    assert torch.equal(
        torch.vmap(native.gram, in_dims=1)(w).transpose(0, 1), native.gram(w.flatten(0, 1)).view(4, 3, 6, 6)
    )
    mapped = torch.vmap(lambda g: native.gram_factor(g, "qr"), in_dims=1)(gram.view(4, 3, 6, 6))
    assert torch.equal(mapped[0].transpose(0, 1).reshape(12, 6, 6), native.gram_factor(gram, "qr")[0])
    error = torch.zeros(4).double()
    mapped = torch.vmap(lambda g: native.spectrum_bracket(g, error, 1e-3, 6), in_dims=1)(gram.view(4, 3, 6, 6))
    expected = native.spectrum_bracket(gram, torch.zeros(12).double(), 1e-3, 6)
    assert torch.equal(mapped[0].transpose(0, 1).reshape(12, 6), expected[0])


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda n: n.gram(torch.ones(2, 2)), "weights must be"),
        (lambda n: n.gram(torch.ones(1, 2, 2).half()), "float32 or float64"),
        (lambda n: n.product_(torch.ones(1, 2, 3), torch.ones(1, 2, 3), torch.ones(1, 2, 3)), "factor must be"),
        (lambda n: n.product_(torch.ones(1, 2, 3), torch.ones(1, 2, 2), torch.ones(1, 2, 3).double()), "no narrower"),
        (lambda n: n.product_(torch.ones(1, 3, 2), torch.ones(1, 2, 2), torch.ones(1, 2, 3)), "out must be"),
        (lambda n: n.gram_factor(torch.ones(2, 2), "polar"), "gram must be"),
        (lambda n: n.gram_factor(torch.ones(1, 2, 3), "polar"), "gram must be"),
        (lambda n: n.gram_factor(torch.ones(1, 2, 2).half(), "polar"), "float32 or float64"),
        (lambda n: n.gram_factor(torch.ones(1, 2, 2), "svd"), "method must be"),
        (lambda n: n.spectrum_bracket(torch.ones(1, 2, 2), torch.zeros(1), 1e-3, 2), "error must be"),
        (lambda n: n.spectrum_bracket(torch.ones(1, 2, 2), torch.zeros(1).double(), 1e-3, 3), "max_steps"),
        (lambda n: n.spectrum_bracket(torch.ones(1, 2, 2), torch.zeros(1).double(), 0.0, 2), "rtol"),
        (lambda n: n.philox_normal_(torch.ones(4), 0, 0, 0), "out must be"),
        (lambda n: n.philox_normal_(torch.ones(1, 4), 0, -1, 0), "head"),
    ],
)
def test_errors_of_the_compiled_ops_name_the_argument(call, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(_ops.native())


def test_empty_batches() -> None:
    """Field report A10."""
    native = _ops.native()
    assert native.gram_factor(torch.empty(0, 4, 4), "polar")[0].shape == (0, 4, 4)
    assert native.gram_factor(torch.empty(3, 0, 0), "qr")[0].shape == (3, 0, 0)
    assert native.spectrum_bracket(torch.empty(0, 4, 4), torch.empty(0).double(), 1e-3, 4)[0].shape == (0, 6)
    native.philox_normal_(torch.empty(0, 4), 0, 0, 0)


# ---- wiring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (3, 16, 64), (2, 3, 20, 20), (1, 1), (4, 1, 5)])
def test_backends_agree(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Field report A15: one suite over every backend."""
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    work = torch.float64 if dtype == torch.float64 else torch.float32
    reference = torch.linalg.svdvals(w.double())
    kappa = reference[..., 0] / reference[..., -1]
    tolerance = 16 * torch.finfo(work).eps * float(kappa.max()) + torch.finfo(dtype).eps
    for method in ("polar", "qr"):
        torch_q, torch_c = ck.certify(w, method=method, backend="torch")
        q, certificate = ck.certify(w, method=method, backend="extension")
        assert q.dtype == dtype and q.is_contiguous() and q.shape == w.shape
        assert (q.double() - torch_q.double()).abs().max() <= tolerance
        assert torch.equal(certificate.status, torch_c.status)
        assert certificate.residual.dtype == torch_c.residual.dtype
    for backend in ("torch", "extension"):
        estimate = ck.condition_number(w, backend=backend)
        assert estimate.status.eq(0).all()
        assert (estimate.low <= kappa * (1 + 1e-12)).all() and (kappa * (1 - 1e-12) <= estimate.high).all()
        assert (estimate.kappa / kappa - 1).abs().max() < 5e-6
    one, two = (ck.semi_orthogonal(shape, seed=3, dtype=dtype, backend=b) for b in ("torch", "extension"))
    assert (one.double() - two.double()).abs().max() <= 32 * torch.finfo(dtype).eps + 1e-5 * (dtype == torch.float32)


@pytest.mark.parametrize("kappa", [1e1, 1e2, 1e3, 1e4, 1e5])
def test_ill_conditioned_weights_keep_their_accuracy_class(kappa: float) -> None:
    """Field report F06: sigma_min/sigma_max to 1e-5 in float32 weights, and the bracket with it."""
    generator = torch.Generator().manual_seed(0)
    u, v = orthogonal(4, 8, generator), orthogonal(4, 24, generator)[:, :8]
    w = ((u * kappa ** -torch.linspace(0, 1, 8).double()) @ v).float()
    truth = torch.linalg.svdvals(w.double())
    truth = truth[:, 0] / truth[:, -1]
    for backend in ("torch", "extension"):
        estimate = ck.condition_number(w, backend=backend)
        assert estimate.status.eq(0).all()
        assert ((estimate.low <= truth) & (truth <= estimate.high)).all()
        assert (estimate.kappa / truth - 1).abs().max() < 1e-3
        q, certificate = ck.certify(w, backend=backend)
        assert certificate.status.eq(0).all()
        assert _torch.orthogonality_residual(q.double()).max() < 1e-6


def test_results_do_not_depend_on_the_thread_count() -> None:
    gram = gram_of(torch.linspace(1, 2, 40).double(), 9, torch.float32)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            bounds = _ops.spectrum_bracket(gram, torch.zeros(9).double(), 1e-3, 40)[0]
            results.append((_ops.gram_factor(gram, "polar")[0], bounds))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_backend_choice_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(8, 16, 64)
    assert ck.explain_backend(w).name == "extension"
    assert "real dtypes" in ck.explain_backend(w.to(torch.complex64)).reason
    assert ck.explain_backend(torch.empty(1, 300, 400)).name == "torch"
    assert ck.backends()["extension"].startswith("available")
    with pytest.raises(RuntimeError, match="complex64"):
        ck.orthogonalize(w.to(torch.complex64), backend="extension")
    with pytest.raises(ValueError, match="backend"):
        ck.orthogonalize(w, backend="cublas")
    absent = _extension.Extension(False, False, "not built")
    monkeypatch.setattr(_backend._extension, "load", lambda: absent)
    assert ck.explain_backend(w).name == "torch"
    assert ck.backends()["extension"] == "not available: not built"
    for call in (ck.orthogonalize, ck.condition_number):
        with pytest.raises(RuntimeError, match="not built"):
            call(w, backend="extension")
    assert ck.orthogonalize(w).isfinite().all()


# ---- libraries that cannot be used ------------------------------------------------------------------------------


def copy_of_package(target: Path) -> Path:
    shutil.copytree(
        ROOT / "conditioned_kernels",
        target / "conditioned_kernels",
        ignore=shutil.ignore_patterns("_native.*", "__pycache__"),
    )
    return target / "conditioned_kernels"


def ask(folder: Path, code: str, **environment: str) -> str:
    variables = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


LOOK = (
    "import conditioned_kernels as ck, torch; print(ck.backends()['extension']);"
    "print(ck.orthogonalize(torch.randn(2, 4, 9)).isfinite().all())"
)


def test_foreign_libraries_never_break_the_import(tmp_path: Path) -> None:
    """Field reports G04 (undefined symbol), G08, G11: a sentence and the fallback, with both versions named."""
    package = copy_of_package(tmp_path)
    record = {"torch": "2.10.0", "stable_abi": "2.10", "machine": platform.machine(), "cuda": []}
    (package / build.RECORD).write_text(json.dumps(record))
    source = tmp_path / "missing.cpp"
    source.write_text("void nowhere(); struct X { X() { nowhere(); } } x;")
    compiler = build.cxx_compiler().split()
    library = package / build.LIBRARY
    subprocess.run([*compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    said = ask(tmp_path, LOOK)
    assert "not available" in said and "nowhere" in said and "built for another torch" in said and "True" in said
    assert "2.10.0" in said and torch.__version__ in said and "conditioned_kernels.build" in said
    library.write_bytes(b"\x7fELF but not really")
    said = ask(tmp_path, LOOK)
    assert "damaged, or for another machine" in said and "True" in said
    (package / build.RECORD).write_text(json.dumps({**record, "machine": "s390x"}))
    assert "wrong architecture" in ask(tmp_path, LOOK)
    (package / build.RECORD).write_text(json.dumps({**record, "sources": "older"}))
    assert "was built from other sources" in ask(tmp_path, LOOK)
    library.unlink()
    assert "not built" in ask(tmp_path, LOOK)
    assert "switched off" in ask(tmp_path, LOOK, CK_NO_EXTENSION="1")


def test_import_loads_no_library_and_prints_nothing(tmp_path: Path) -> None:
    """Field reports E14 and G11."""
    copy_of_package(tmp_path)
    code = (
        "import sys, conditioned_kernels; from conditioned_kernels import _extension;"
        "assert _extension.load.cache_info().currsize == 0; assert 'triton' not in sys.modules"
    )
    assert ask(tmp_path, code) == ""

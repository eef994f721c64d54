"""The Triton kernels in Triton's interpreter, against plain torch. Run by tests/test_triton_interpreter.py."""

from __future__ import annotations

import functools
import os

import pytest
import torch
import triton
import triton.language as tl

import conditioned_kernels as ck
from conditioned_kernels import _backend, _torch, _triton
from conditioned_kernels._triton import gram as gram_module
from conditioned_kernels._triton import heads as heads_module
from conditioned_kernels._triton import launch_config, route
from conditioned_kernels._triton.apply import apply
from conditioned_kernels._triton.gram import gram
from conditioned_kernels._triton.heads import group, heads_of, samples_of
from conditioned_kernels._triton.identity import identity
from conditioned_kernels._triton.polar import polar
from conditioned_kernels._triton.product import product
from conditioned_kernels._triton.sample import box_muller, normal_tile
from conditioned_kernels.heads.layout import HeadView
from conditioned_kernels.initialize import apply as apply_scheme_module
from conditioned_kernels.initialize.conditioned import identity_heads
from conditioned_kernels.orthogonalize import _redraw, semi_orthogonal
from conditioned_kernels.sampling import _box_muller, philox_normal, stream_key

if os.environ.get("TRITON_INTERPRET") != "1":
    raise RuntimeError("run me with TRITON_INTERPRET=1, as tests/test_triton_interpreter.py does")

CPU = torch.device("cpu")
KEY = 0xFEDCBA9876543210
SIGNED = KEY - (1 << 64)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1), (1, 511), (3, 17), (17, 63), (63, 65), (65, 127), (80, 96), (96, 511))
# The interpreter truncates fp32 to bf16, where a GPU rounds to nearest.
STORED = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}


def gaussian(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def assert_gram(result: torch.Tensor, w: torch.Tensor) -> None:
    exact = w.double() @ w.double().mT
    assert torch.equal(result, result.mT)
    assert (result - exact).abs().amax() <= 2e-6 * exact.diagonal(dim1=-2, dim2=-1).amax()


@triton.jit
def _tile_kernel(
    out_ptr, key, head, start, row_stride, col_stride, R: tl.constexpr, C: tl.constexpr, HAS_QUADS: tl.constexpr
):
    row = tl.arange(0, R)
    tile = normal_tile(row, start, C, row_stride, col_stride, head, key, HAS_QUADS)
    tl.store(out_ptr + row[:, None] * C + tl.arange(0, C)[None, :], tile)


@triton.jit
def _pair_kernel(radius_ptr, angle_ptr, out_ptr, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    radius = tl.load(radius_ptr + i).to(tl.uint32)
    angle = tl.load(angle_ptr + i).to(tl.uint32)
    z0, z1 = box_muller(radius, angle)
    tl.store(out_ptr + 2 * i, z0)
    tl.store(out_ptr + 2 * i + 1, z1)


@pytest.mark.parametrize(
    ("strides", "start", "quads"), [((96, 1), 64, True), ((96, 1), 64, False), ((33, 1), 0, False), ((1, 7), 4, False)]
)
def test_samples_are_the_stream_to_the_last_bit(strides: tuple[int, int], start: int, quads: bool) -> None:
    out = poisoned(4, 32)
    _tile_kernel[(1,)](out, SIGNED, 5, start, *strides, R=4, C=32, HAS_QUADS=quads)
    element = torch.arange(4)[:, None] * strides[0] + (start + torch.arange(32)) * strides[1]
    expected = philox_normal(KEY, range(5, 6), range(int(element.max()) + 1))[0][element]
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


def test_samples_beyond_32_bits_of_the_counter() -> None:
    out, start = poisoned(1, 32), 1 << 20
    _tile_kernel[(1,)](out, SIGNED, 2, start, 1 << 34, 1, R=1, C=32, HAS_QUADS=True)
    expected = philox_normal(KEY, range(2, 3), range(start, start + 32))
    assert torch.equal(out, expected)
    out = poisoned(2, 32)
    _tile_kernel[(1,)](out, SIGNED, 2, 0, 1 << 34, 1, R=2, C=32, HAS_QUADS=True)
    assert torch.equal(out[1:], philox_normal(KEY, range(2, 3), range(1 << 34, (1 << 34) + 32)))


def test_box_muller_at_the_ends_of_its_range() -> None:
    ends = [0, 1, 2, 3, (1 << 29) - 1, 1 << 29, 1 << 30, 1 << 31, (1 << 32) - (1 << 29), (1 << 32) - 2, (1 << 32) - 1]
    radius = torch.tensor(ends + [0] * 5).repeat_interleave(16)
    angle = torch.tensor(ends + [0] * 5).repeat(16)
    out, expected = poisoned(256, 2), torch.empty(256, 2)
    _pair_kernel[(1,)](radius, angle, out, SIZE=256)
    _box_muller(radius, angle, expected)
    assert torch.equal(out.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gram_and_apply_on_odd_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = gaussian(2, *shape, dtype=dtype)
    assert_gram(gram(heads_of(w), dtype), w)
    factor, gains = gaussian(2, shape[0], shape[0], seed=1), torch.tensor([1.0, 0.5])
    out = poisoned(2, *shape, dtype=dtype)
    residual = apply(factor, heads_of(w), heads_of(out), gains, certify=True)
    exact = gains[:, None, None] * (factor.double() @ w.double())
    assert (out - exact).abs().amax() <= STORED[dtype] * exact.abs().amax()
    expected = out.double() @ out.double().mT / gains.double()[:, None, None] ** 2 - torch.eye(shape[0])
    assert torch.allclose(residual.double(), expected.abs().amax((1, 2)), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_views_are_read_and_written_where_they_lie(dtype: torch.dtype) -> None:
    parent, target = gaussian(9, 3, 40, dtype=dtype), poisoned(50, 30, dtype=dtype)
    w = parent[1:7:2, 1:, 3:37:2].transpose(0, 1)  # two heads of 3 x 17, no stride 1 among rows, an offset
    out = target[5:39:2, 2:8].unflatten(1, (2, 3)).permute(1, 2, 0)  # stored transposed
    assert_gram(gram(heads_of(w), dtype), w)
    factor = gaussian(2, 3, 3, seed=1)
    apply(factor, heads_of(w), heads_of(out), torch.ones(2))
    exact = factor.double() @ w.double()
    assert (out - exact).abs().amax() <= STORED[dtype] * exact.abs().amax()
    assert int(target.isnan().sum()) == target.numel() - out.numel()


def test_apply_may_write_over_what_it_reads() -> None:
    w = gaussian(2, 20, 300)
    factor = gaussian(2, 20, 20, seed=1)
    expected = poisoned(2, 20, 300)
    apply(factor, heads_of(w), heads_of(expected), torch.ones(2))
    apply(factor, heads_of(w), heads_of(w), torch.ones(2))
    assert torch.equal(w, expected)


def test_split_sums_agree_and_one_head_is_the_batch() -> None:
    w = gaussian(3, 17, 1000)
    whole = gram(heads_of(w), torch.float32, splits=1)
    split = gram(heads_of(w), torch.float32, splits=4)
    assert (split - whole).abs().amax() <= 1e-6 * whole.amax()
    assert torch.equal(split, gram(heads_of(w), torch.float32, splits=4))
    assert torch.equal(gram(heads_of(w[1:2]), torch.float32, splits=1)[0], whole[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(8, 96), (12, 33), (40, 9), (8, 8)])
def test_sampled_kernels_equal_the_same_numbers_in_memory(shape: tuple[int, int], dtype: torch.dtype) -> None:
    source = samples_of([KEY, 7], [0, 0], [2, 1], *shape, CPU)
    elements = range(shape[0] * shape[1])
    w = torch.cat([philox_normal(KEY, range(2), elements), philox_normal(7, range(1), elements)]).view(3, *shape)
    w = w if shape[0] < shape[1] else w.mT
    assert_gram(gram(source, dtype), w)
    factor, out, expected = gaussian(3, source.rows, source.rows), poisoned(*w.shape, dtype=dtype), None
    apply(factor, source, heads_of(out), torch.ones(3))
    expected = factor.double() @ w.double()
    assert (out - expected).abs().amax() <= STORED[dtype] * expected.abs().amax()


FORMS = {
    "separate": ((24, 40), HeadView((3, 8))),
    "fused": ((72, 40), HeadView((9, 8), (slice(3, 6),))),
    "interleaved": ((72, 40), HeadView((3, 3, 8), (slice(None), 1))),
    "grouped": ((64, 40), HeadView((2, 4, 8), (slice(None), slice(2)))),
    "input major": ((40, 72), HeadView((9, 8), (slice(3, 6),), input_major=True)),
    "tall heads": ((24, 5), HeadView((3, 8))),
    "square heads": ((24, 8), HeadView((3, 8))),
    "odd": ((21, 37), HeadView((3, 7))),
}


@pytest.mark.parametrize("method", ["polar", "qr"])
@pytest.mark.parametrize("form", FORMS)
def test_every_storage_form_is_drawn_in_place(form: str, method: str) -> None:
    shape, view = FORMS[form]
    weight = poisoned(*shape)
    heads = view(weight)
    key = stream_key(3, form, "q")
    residual = route.semi_orthogonal_([heads], [key], [0], [0.5], method, _torch.factor, _redraw(method))
    expected = semi_orthogonal(tuple(heads.shape), seed=3, key=form, role="q", gain=0.5, method=method, backend="torch")
    assert (heads - expected).abs().amax() < 1e-5
    assert residual.shape == (heads.shape[:-2].numel(),)
    assert residual.amax() < 2e-6
    assert int(weight.isnan().sum()) == weight.numel() - heads.numel()


@pytest.mark.parametrize("shape", [(5, 8, 40), (5, 24, 5)])
def test_a_part_of_the_heads_has_the_bits_of_the_whole(shape: tuple[int, ...]) -> None:
    whole, part = poisoned(*shape), poisoned(2, *shape[1:])
    for tensor, first in ((whole, 0), (part, 3)):
        route.semi_orthogonal_([tensor], [KEY], [first], [0.5], "polar", _torch.factor, _redraw("polar"))
    assert torch.equal(part, whole[3:])


def _breaking(matrices: torch.Tensor, method: str) -> torch.Tensor:
    result = _torch.factor(matrices, method)
    result[-1] = torch.nan
    return result


def test_refused_factors_are_redrawn() -> None:
    tensors = [poisoned(1, 4, 8), poisoned(8, 6).unflatten(0, (2, 4))]
    residual = route.semi_orthogonal_(tensors, [1, 2], [0, 3], [1.0, 0.5], "polar", _breaking, _redraw("polar"))
    assert residual.amax() < 2e-6
    gram_matrices = tensors[1] @ tensors[1].mT
    assert (gram_matrices - 0.25 * torch.eye(4)).abs().amax() < 1e-6


def test_singular_samples_leave_everything_untouched() -> None:
    tensors = [poisoned(1, 4, 8), poisoned(2, 4, 8)]

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("drew a numerically singular matrix")

    with pytest.raises(RuntimeError, match="singular"):
        route.semi_orthogonal_(tensors, [1, 2], [0, 0], [1.0, 1.0], "polar", _breaking, refuse)
    assert all(tensor.isnan().all() for tensor in tensors)


class _Counted:
    """A kernel that counts its launches and their programs."""

    def __init__(self, kernel: object) -> None:
        self.kernel, self.grids = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.grids.append(grid)
        return self.kernel[grid]


def test_48_layers_of_12_heads_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = _Counted(gram_module.gram_kernel)
    monkeypatch.setattr(gram_module, "gram_kernel", kernel)
    layers = [gaussian(12, 2, 16, seed=i) for i in range(48)]
    ((heads, members),) = group(layers)
    assert members == list(range(48))
    result = gram(heads, torch.float32, splits=1)
    assert kernel.grids == [(576, 1)]
    assert_gram(result, torch.cat(layers))


def test_workspace_cap_makes_several_launches_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, capped = [poisoned(5, 4, 16) for _ in range(2)], [poisoned(5, 4, 16) for _ in range(2)]
    whole = route.semi_orthogonal_(tensors, [1, 2], [0, 0], [1.0, 2.0], "qr", _torch.factor, _redraw("qr"))
    monkeypatch.setattr(heads_module, "WORKSPACE_BYTES", 3 * 2 * 4 * 4 * 4)
    parts = route.semi_orthogonal_(capped, [1, 2], [0, 0], [1.0, 2.0], "qr", _torch.factor, _redraw("qr"))
    assert torch.equal(torch.cat(tensors), torch.cat(capped))
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["polar", "qr"])
def test_orthogonalize_keeps_the_accuracy_class_of_torch(method: str, dtype: torch.dtype) -> None:
    w = gaussian(5, 12, 40, dtype=dtype)
    w[1] *= 1e-3
    w[2, 1] = w[2, 0] + (1e-4 * w[2, 1] if dtype == torch.float32 else 0)  # kappa 1e4, or singular
    w[3] = 0
    w[4, 0, 0] = torch.nan
    out, expected = poisoned(5, 12, 40, dtype=dtype), poisoned(5, 12, 40, dtype=dtype)
    residual, status = route.orthogonalize(w, method, out, _torch.factor, _torch.careful)
    _, torch_status = _torch.orthogonalize(w, method, expected, _torch.SMALL_MATRIX)
    assert torch.equal(status, torch_status)
    assert bool((residual[:2] <= route.tolerance(dtype)).all())
    assert torch.equal(out.isnan(), expected.isnan())
    exact = slice(0, 3) if dtype == torch.float32 else slice(0, 2)  # the null space of a singular one is free
    bound = 1e-4 if dtype == torch.float32 else 3 * STORED[dtype]
    assert (out[exact].float() - expected[exact].float()).abs().amax() <= bound


def test_more_than_128_rows_take_whole_matrix_products(monkeypatch: pytest.MonkeyPatch) -> None:
    w = gaussian(1, 130, 140)
    for method, large in (("qr", 256), ("polar", 128)):
        monkeypatch.setattr(route, "LARGE", large)
        out, expected = poisoned(1, 130, 140), poisoned(1, 130, 140)
        residual, status = route.orthogonalize(w, method, out, _torch.factor, _torch.careful)
        _torch.orthogonalize(w, method, expected, _torch.SMALL_MATRIX)
        assert residual.item() <= route.tolerance(torch.float32)
        assert status.item() == 0
        assert (out - expected).abs().amax() < 3e-5


def test_gram_rounding_is_a_bound() -> None:
    w = gaussian(3, 17, 500, dtype=torch.bfloat16)
    result, terms = route.gram_terms(w)
    rounding = _torch.gram_rounding(result, terms)
    exact = torch.linalg.eigvalsh(w.double() @ w.double().mT)
    error = (torch.linalg.eigvalsh(result.double()) - exact).abs().amax(-1)
    assert bool((error <= rounding).all())
    assert bool((rounding <= 2e-4 * exact.sum(-1)).all())


def test_product_general_and_symmetric() -> None:
    a, b, d = gaussian(2, 130, 70), gaussian(2, 65, 70, seed=1), gaussian(2, 130, 130, seed=2)
    assert (product(a, b) - a @ b.mT).abs().amax() < 5e-5
    assert (product(a.mT.contiguous().mT, b) - a @ b.mT).abs().amax() < 5e-5
    d = d + d.mT
    result = product(a, a, d, alpha=2.0, beta=0.5, gamma=3.0, symmetric=True)
    assert torch.equal(result, result.mT)
    assert (result - (2 * a @ a.mT + 0.5 * d + 3 * torch.eye(130))).abs().amax() < 2e-4
    assert torch.equal(product(a[1:], a[1:], symmetric=True)[0], product(a, a, symmetric=True)[1])
    assert torch.equal(product(a, a, symmetric=True), product(a, a, symmetric=True))


def test_lower_triangle_blocks_are_numbered_without_gaps() -> None:
    a = gaussian(1, 64 * 9, 4)
    result = product(a, a, symmetric=True, precision="ieee")
    assert (result - a @ a.mT).abs().amax() < 1e-5


def test_polar_iteration_on_the_kernel() -> None:
    w = gaussian(2, 40, 50)
    q, residual = polar(w, 1e-6, product)
    u, _, v = torch.linalg.svd(w.double(), full_matrices=False)
    assert residual.amax() <= 1e-6
    assert (q - u @ v).abs().amax() < 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [True, False])
def test_identity_fills_views_exactly(block: bool, dtype: torch.dtype) -> None:
    views = [poisoned(3, 7, 20, dtype=dtype), poisoned(3, 20, 7, dtype=dtype), poisoned(2, 2, 5, 40, dtype=dtype).mT]
    identity(views, [0.5, 2.0, 1.5], block=block)
    for view, gain in zip(views, (0.5, 2.0, 1.5), strict=True):
        assert torch.equal(view, identity_heads(view, gain, block=block))


def test_warmup_writes_nothing() -> None:
    weights = [gaussian(2, 6, 24), gaussian(2, 6, 24, seed=1), gaussian(24, 12).mT.unflatten(0, (2, 6))]
    before = [weight.clone() for weight in weights]
    assert route.warmup(weights, "polar", _torch.factor, _redraw("polar")) == 2
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


@pytest.fixture
def triton_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public functions choose the Triton backend for CPU tensors, which only the interpreter can serve."""
    monkeypatch.setattr(_triton, "refusal", lambda device, dtype, short: "" if dtype in _triton.DTYPES else "dtype")
    row = _backend._TABLE["triton"]._replace(refusal=lambda *given: _triton.refusal(*given))
    monkeypatch.setitem(_backend._TABLE, "triton", row)


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(gaussian(36, 20))


def _views(module: Attention) -> dict[str, torch.Tensor]:
    query, key, value = module.weight.view(3, 3, 4, 20)
    return {"q": query, "k": key, "v": value}


@pytest.mark.parametrize("value", ["block", "semi_orthogonal"])
def test_conditioned_init_of_a_model_is_few_launches(
    value: str, monkeypatch: pytest.MonkeyPatch, triton_everywhere: None
) -> None:
    kernel = _Counted(gram_module.gram_kernel)
    model, expected = (torch.nn.ModuleList([Attention() for _ in range(3)]) for _ in range(2))
    options = {"seed": 4, "value": value, "layouts": {Attention: _views}, "gain": {"q": 0.5, "k": "preserve"}}
    with monkeypatch.context() as patch:
        patch.setattr(gram_module, "gram_kernel", kernel)
        patch.setattr(apply_scheme_module, "measure", lambda *_, **__: None)
        ck.conditioned_(model, **options)
    assert kernel.grids == [((3 if value == "semi_orthogonal" else 2) * 9, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(_triton, "refusal", lambda *_: "not now")
        ck.conditioned_(expected, **options)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        assert (ours - theirs).abs().amax() < 1e-5
    assert ck.warmup(model, layouts=options["layouts"]) == 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_public_functions_on_the_backend(dtype: torch.dtype, triton_everywhere: None) -> None:
    w = gaussian(2, 2, 9, 30, dtype=dtype)
    q, certificate = ck.certify(w, backend="triton")
    assert certificate.failures() == []
    assert certificate.residual.shape == (2, 2)
    assert (q.float() - ck.orthogonalize(w, backend="torch").float()).abs().amax() <= 2 * STORED[dtype]
    estimate, expected = ck.condition_number(w, backend="triton"), ck.condition_number(w, backend="torch")
    exact = torch.linalg.cond(w.double())
    assert bool(((estimate.low <= exact) & (exact <= estimate.high)).all())
    assert torch.allclose(estimate.kappa, expected.kappa, rtol=1e-5)
    out = ck.semi_orthogonal((2, 9, 30), seed=1, dtype=dtype, backend="triton")
    reference = ck.semi_orthogonal((2, 9, 30), seed=1, dtype=dtype, backend="torch")
    assert (out.float() - reference.float()).abs().amax() <= 2 * STORED[dtype]
    assert ck.explain_backend(w, "triton").name == "triton"


def test_self_test_passes_and_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert route.self_test(CPU) == ""
    wrong = functools.partial(gram, splits=1)
    monkeypatch.setattr(route, "gram", lambda source, dtype, splits=None: wrong(source, dtype) * 1.001)
    assert "Gram kernel" in route.self_test(CPU)


def test_ieee_precision_of_rocm_is_served_by_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_config, "architecture", lambda device: launch_config.HIP)
    w = gaussian(1, 17, 63)
    assert_gram(gram(heads_of(w), torch.float32), w)

"""The attention Jacobian against torch.func and the SVD in float64."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import conditioned_kernels as ck
from conditioned_kernels import AttentionHeads, NoJacobian, Status
from conditioned_kernels.jacobian import (
    FACTORS,
    HeadNorm,
    Rotary,
    attention_output,
    attention_probabilities,
    jvp,
    vjp,
)
from conditioned_kernels.jacobian.bound import softmax_condition
from conditioned_kernels.jacobian.dense import gram, matrix, value_blocks
from conditioned_kernels.jacobian.krylov import FAILURE, gaussian, largest, shortfall, smallest, steps_for
from conditioned_kernels.jacobian.linear import linearize

ROOT = Path(__file__).resolve().parent.parent
FEATURES = 40


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def rotary(tokens: int, rotated: int, interleaved: bool) -> Rotary:
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] / 3.0 ** torch.arange(rotated // 2)
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat((angles, angles), -1)
    return Rotary(angles.cos(), angles.sin(), interleaved)


def mechanic(name: str, tokens: int, d: int) -> dict[str, Any]:
    """Arguments of AttentionHeads for one thing that attention may do."""
    position = torch.arange(tokens)
    distance = position[:, None] - position
    padding = (position < max(1, tokens - 2)).expand(tokens, tokens)
    return {
        "plain": {},
        "causal": {"mask": distance >= 0},
        "padding": {"mask": padding},
        "window": {"mask": (distance >= 0) & (distance < 3)},
        "additive": {"mask": randn(tokens, tokens, seed=5)},
        "biases": {"b_q": randn(d, seed=6), "b_k": randn(d, seed=7), "b_v": randn(d, seed=8)},
        "scale": {"scale": 1.0},
        "softcap": {"softcap": 0.7},
        "rope": {"rope": rotary(tokens, d, False), "mask": distance >= 0},
        "partial rope in pairs": {"rope": rotary(tokens, d // 2, True)},
        "rms norm": {
            "norm_q": HeadNorm("rms", randn(d, seed=9), eps=1e-3),
            "norm_k": HeadNorm("rms", None, randn(d, seed=10), 1e-3),
        },
        "layer norm, rope": {
            "norm_q": HeadNorm("layer", randn(d, seed=9), randn(d, seed=10), 1e-5),
            "norm_k": HeadNorm("layer", randn(d, seed=11), None, 1e-5),
            "rope": rotary(tokens, d, False),
        },
        "rope, l2 norm": {
            "norm_q": HeadNorm("l2", eps=1e-6),
            "norm_k": HeadNorm("l2", randn(d, seed=9), eps=1e-6),
            "rope": rotary(tokens, d, False),
            "norm_first": False,
            "scale": 4.0,
        },
        "memory": {"memory": randn(tokens + 3, FEATURES, seed=12)},
        "values": {"memory": randn(tokens + 3, FEATURES, seed=12), "values": randn(tokens + 3, FEATURES, seed=13)},
        "sink": {"sink": torch.tensor(0.5).double(), "mask": distance >= 0, "b_v": randn(d, seed=8)},
        "shared keys": {
            "memory": randn(tokens, FEATURES, seed=12),
            "shared_keys": randn(tokens, 2, seed=13),
            "rope": rotary(tokens, 2, True),
            "mask": distance >= 0,
        },
        "norm over heads": {
            "norm_q": HeadNorm("rms", randn(d, seed=9), None, 1e-3, randn(tokens, seed=10).square() * 2 * d, 3 * d),
            "norm_k": HeadNorm("rms", None, None, 1e-3, randn(tokens, seed=11).square() * d, 2 * d),
        },
        "channels": {
            "channels": True,
            "scale": 1 / tokens,
            **{name: randn(d, seed=i) for i, name in enumerate(("b_q", "b_k", "b_v"), 6)},
        },
        "channels, l2 norm": {
            "channels": True,
            "norm_q": HeadNorm("l2", eps=1e-24),
            "norm_k": HeadNorm("l2", eps=1e-24),
            "scale": 1.5,
        },
    }[name]


MECHANICS = (
    "plain",
    "causal",
    "padding",
    "window",
    "additive",
    "biases",
    "scale",
    "softcap",
    "rope",
    "partial rope in pairs",
    "rms norm",
    "layer norm, rope",
    "rope, l2 norm",
    "memory",
    "values",
    "sink",
    "shared keys",
    "norm over heads",
    "channels",
    "channels, l2 norm",
)


def problem(name: str, tokens: int, d: int, *, size: float = 1.0, features: int = FEATURES) -> AttentionHeads:
    given = mechanic(name, tokens, d)
    rows = (d + given["shared_keys"].shape[-1] if "shared_keys" in given else d, d, d)
    weights = [size * randn(n, features, seed=i) / math.sqrt(features) for i, n in enumerate(rows, 1)]
    return AttentionHeads(randn(tokens, features, seed=4), *weights, **given)


def attend(heads: AttentionHeads, w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """One head written as in a textbook, for autograd."""
    memory = heads.x if heads.memory is None else heads.memory
    values = memory if heads.values is None else heads.values

    def side(tokens: Tensor, weight: Tensor, bias: Tensor | None, norm: HeadNorm | None) -> Tensor:
        out = tokens @ weight.T
        if bias is not None:
            out = out + bias
        if heads.channels:
            out = out.T
        steps = [lambda y: normed(norm, y), turned if tokens is heads.x or heads.shared_keys is None else lambda y: y]
        for step in steps if heads.norm_first else steps[::-1]:
            out = step(out)
        return out

    def normed(norm: HeadNorm | None, y: Tensor) -> Tensor:
        if norm is None:
            return y
        if norm.kind == "layer":
            y = torch.nn.functional.layer_norm(y, y.shape[-1:], norm.gain, norm.bias, norm.eps)
            return y
        square = y.square().sum(-1, keepdim=True)
        if norm.others is not None:
            square = (square + norm.others[:, None]) / norm.over
        elif norm.kind == "rms":
            square = square / y.shape[-1]
        y = y / torch.sqrt(square + norm.eps)
        y = y if norm.gain is None else y * norm.gain
        return y if norm.bias is None else y + norm.bias

    def turned(y: Tensor) -> Tensor:
        if heads.rope is None:
            return y
        size = heads.rope.cos.shape[-1]
        first, second = (
            (slice(0, size, 2), slice(1, size, 2))
            if heads.rope.interleaved
            else (
                slice(0, size // 2),
                slice(size // 2, size),
            )
        )
        cos, sin = heads.rope.cos[:, first], heads.rope.sin[:, first]
        out = y.clone()
        out[:, first] = y[:, first] * cos - y[:, second] * sin
        out[:, second] = y[:, second] * cos + y[:, first] * sin
        return out

    q, k = side(heads.x, w_q, heads.b_q, heads.norm_q), side(memory, w_k, heads.b_k, heads.norm_k)
    v = values @ w_v.T if heads.b_v is None else values @ w_v.T + heads.b_v
    if heads.channels:
        v = v.T
    if heads.shared_keys is not None:
        k = torch.cat((heads.shared_keys, k), -1)
    logits = q @ k.T * (w_q.shape[0] ** -0.5 if heads.scale is None else heads.scale)
    if heads.softcap is not None:
        logits = heads.softcap * torch.tanh(logits / heads.softcap)
    if heads.mask is not None:
        boolean = heads.mask.dtype == torch.bool
        logits = logits.masked_fill(~heads.mask, -torch.inf) if boolean else logits + heads.mask
    if heads.sink is not None:
        p = torch.cat((logits, heads.sink.expand(len(logits), 1)), -1).softmax(-1)[:, :-1]
    else:
        p = logits.softmax(-1)
    return (p @ v).T if heads.channels else p @ v


def jacobian(heads: AttentionHeads) -> Tensor:
    """J by autograd, (tokens * value_dim, parameters), rows in the order of the output."""
    parts = torch.func.jacrev(lambda *w: attend(heads, *w), argnums=(0, 1, 2))(*heads.weights)
    return torch.cat([part.flatten(2) for part in parts], -1).flatten(0, 1)


def exact_kappa(heads: AttentionHeads) -> float:
    values = torch.linalg.svdvals(jacobian(heads))
    return float(values[0] / values[-1])


SIZES = [(name, n, 4) for name in MECHANICS for n in (1, 2, 7, 16, 33)] + [
    (name, n, 16) for name in ("plain", "causal", "rope", "layer norm, rope", "softcap") for n in (1, 2, 7, 16)
]
LARGE = [(name, 33, 16) for name in ("plain", "causal", "rope")]
LARGE += [("sink", 7, 16), ("sink", 16, 16), ("channels, l2 norm", 16, 16)]


@pytest.mark.parametrize(("name", "tokens", "d"), SIZES + LARGE)
def test_exact_and_lanczos_agree_with_the_svd_of_autograds_jacobian(name: str, tokens: int, d: int):
    heads = problem(name, tokens, d)
    values = torch.linalg.svdvals(jacobian(heads))
    exact = ck.jacobian_condition(heads, method="exact")
    if values[-1] <= max(heads.rows, heads.cols) * 2.3e-16 * values[0]:
        kept = values[values > max(heads.rows, heads.cols) * 2.3e-16 * values[0]]
        assert exact.status == Status.RANK_DEFICIENT and exact.kappa == math.inf
        assert abs(float(exact.effective * kept[-1] / kept[0]) - 1) < 1e-6
        return
    kappa = float(values[0] / values[-1])
    assert kappa < 1e7, "the case is too ill-conditioned to test 1e-8"
    assert exact.status == Status.CONVERGED, exact.failures()
    assert abs(float(exact.kappa) / kappa - 1) < 1e-8 * max(1, kappa / 1e5)
    assert float(exact.effective) == float(exact.kappa)
    for name in ("sigma_max", "sigma_min"):
        value = float(values[0 if name == "sigma_max" else -1])
        assert float(getattr(exact, f"{name}_low")) <= value * (1 + 1e-12)
        assert float(getattr(exact, f"{name}_high")) >= value * (1 - 1e-12)
    for estimate in (exact, ck.jacobian_condition(heads, method="lanczos")):
        assert float(estimate.low) <= kappa * (1 + 1e-9)
        assert float(estimate.high) >= kappa * (1 - 1e-9)
    assert float(exact.high / exact.low) <= 1.001


@pytest.mark.parametrize("name", MECHANICS)
def test_output_and_products_agree_with_torch_func(name: str):
    heads = problem(name, 7, 4)
    torch.testing.assert_close(attention_output(heads), attend(heads, *heads.weights), rtol=1e-12, atol=1e-13)
    change = [randn(*weight.shape, seed=20 + i) for i, weight in enumerate(heads.weights)]
    _, forward = torch.func.jvp(lambda *w: attend(heads, *w), heads.weights, tuple(change))
    torch.testing.assert_close(jvp(heads, *change), forward, rtol=1e-11, atol=1e-12)
    u = randn(*forward.shape, seed=30)
    _, pull = torch.func.vjp(lambda *w: attend(heads, *w), *heads.weights)
    for got, expected in zip(vjp(heads, u), pull(u), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@given(
    tokens=st.integers(1, 6),
    keys=st.integers(1, 6),
    features=st.integers(1, 7),
    d=st.integers(1, 5),
    value=st.integers(1, 5),
    batch=st.lists(st.integers(1, 3), max_size=2).map(tuple),
    seed=st.integers(0, 1000),
)
def test_products_are_adjoint_and_compression_keeps_the_spectrum(tokens, keys, features, d, value, batch, seed):
    heads = AttentionHeads(
        randn(*batch, tokens, features, seed=seed),
        *(randn(*batch, d, features, seed=seed + i) for i in (1, 2)),
        randn(*batch, value, features, seed=seed + 3),
        memory=randn(keys, features, seed=seed + 4),
        b_k=randn(d, seed=seed + 5),
    )
    change = [randn(*weight.shape, seed=seed + 6 + i) for i, weight in enumerate(heads.weights)]
    u = randn(*batch, tokens, value, seed=seed + 9)
    forward, back = jvp(heads, *change), vjp(heads, u)
    left = (forward * u).sum()
    right = sum((w * g).sum() for w, g in zip(change, back, strict=True))
    size = forward.norm() * u.norm() + 1e-30
    assert abs(left - right) <= 1e-12 * size
    number = math.prod(batch)
    head = linearize(heads.select(torch.arange(number)))
    whole, small = matrix(head), matrix(head.compressed())
    torch.testing.assert_close(gram(head), whole @ whole.mT, rtol=1e-11, atol=1e-11)
    values = torch.linalg.svdvals(whole)
    spare = value - head.compressed().v.shape[-1]
    context = torch.linalg.svdvals(head.context()).repeat(1, spare)
    joined = torch.cat((torch.linalg.svdvals(small), context), -1).sort(-1, descending=True).values
    count = min(values.shape[-1], joined.shape[-1])
    torch.testing.assert_close(joined[:, :count], values[:, :count], rtol=1e-10, atol=1e-10)
    assert bool((values[:, count:] < 1e-10).all()) and bool((joined[:, count:] < 1e-10).all())


@pytest.mark.parametrize("name", ["plain", "causal", "additive", "softcap", "rms norm"])
def test_with_as_many_value_coordinates_as_tokens_the_bottom_is_that_of_p_x(name: str):
    heads = problem(name, 9, 12)
    values = torch.linalg.svdvals(jacobian(heads))
    context = torch.linalg.svdvals(attention_probabilities(heads) @ heads.x)
    assert abs(float(values[-1] / context[-1]) - 1) < 1e-10
    estimate = ck.jacobian_condition(heads, method="lanczos")
    assert estimate.status == Status.CONVERGED
    assert float(estimate.high / estimate.low) <= 1.1
    assert abs(float(estimate.sigma_min / context[-1]) - 1) < 1e-12


def test_lanczos_says_so_where_its_bracket_is_wide():
    estimate = ck.jacobian_condition(problem("plain", 16, 4), method="lanczos")
    exact = ck.jacobian_condition(problem("plain", 16, 4), method="exact")
    assert estimate.status == Status.TOLERANCE_NOT_MET
    assert "bracket or residual still holds" in estimate.failures()[0]
    assert float(estimate.low) <= float(exact.kappa) * (1 + 1e-9) <= float(estimate.high)
    # The Ritz value is far better than what it can prove.
    assert abs(float(estimate.kappa / exact.kappa) - 1) < 1e-3


def test_grouped_heads_are_each_query_head_with_its_groups_weights():
    x, w_q = randn(7, FEATURES), randn(4, 4, FEATURES, seed=1) / 6
    w_k, w_v = (randn(2, 4, FEATURES, seed=i) / 6 for i in (2, 3))
    grouped = AttentionHeads(x, w_q, w_k.repeat_interleave(2, 0), w_v.repeat_interleave(2, 0))
    kappa = ck.jacobian_condition(grouped).kappa
    for head in range(4):
        alone = AttentionHeads(x, w_q[head], w_k[head // 2], w_v[head // 2])
        assert abs(float(kappa[head]) / exact_kappa(alone) - 1) < 1e-8


def test_leading_dimensions_broadcast():
    heads = AttentionHeads(randn(3, 1, 5, 12), *(randn(2, 4, 12, seed=i) / 3 for i in (1, 2, 3)), scale=randn(2).abs())
    assert heads.shape == (3, 2)
    estimate, bound = ck.jacobian_condition(heads), ck.jacobian_bound(heads)
    assert estimate.kappa.shape == bound.bound.shape == bound.kappa_q.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            one = AttentionHeads(heads.x[i, 0], *(w[j] for w in heads.weights), scale=heads.scale[j])
            assert abs(float(ck.jacobian_condition(one).kappa / estimate.kappa[i, j]) - 1) < 1e-9
            assert abs(float(ck.jacobian_bound(one).bound / bound.bound[i, j]) - 1) < 1e-9


def test_one_nan_marks_one_head_and_leaves_the_others():
    """A19."""
    weights = [randn(12, 4, 16, seed=i) / 4 for i in (1, 2, 3)]
    healthy = ck.jacobian_condition(AttentionHeads(randn(6, 16), *weights))
    weights[1] = weights[1].clone()
    weights[1][5, 0, 0] = torch.nan
    weights[2] = weights[2].clone()
    weights[2][7, 1, 1] = torch.inf
    for method in ("exact", "lanczos"):
        got = ck.jacobian_condition(AttentionHeads(randn(6, 16), *weights), method=method)
        assert got.kappa.isnan().nonzero().flatten().tolist() == [5, 7]
        assert (got.status == Status.NON_FINITE).nonzero().flatten().tolist() == [5, 7]
        others = [i for i in range(12) if i not in (5, 7)]
        torch.testing.assert_close(got.kappa[others], healthy.kappa[others], rtol=0.1, atol=0)
        bound = ck.jacobian_bound(AttentionHeads(randn(6, 16), *weights)).bound
        assert bound.isnan().nonzero().flatten().tolist() == [5, 7]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_stored_values_are_worked_in_float64(dtype: torch.dtype):
    heads = problem("plain", 7, 4)
    stored = AttentionHeads(heads.x.to(dtype), *(w.to(dtype) for w in heads.weights))
    wide = AttentionHeads(stored.x.double(), *(w.double() for w in stored.weights))
    estimate = ck.jacobian_condition(stored)
    assert estimate.kappa.dtype == torch.float64
    assert float(estimate.kappa) == float(ck.jacobian_condition(wide).kappa)
    assert jvp(stored, *stored.weights).dtype == torch.float64


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_grad_modes_and_rng_do_not_matter(mode, untouched_rng):
    with mode():
        heads = problem("causal", 7, 4)
        heads.w_q.requires_grad_(mode is torch.enable_grad)
        estimate = ck.jacobian_condition(heads)
        assert not estimate.kappa.requires_grad
        assert not jvp(heads, *heads.weights).requires_grad
        assert not ck.jacobian_bound(heads).bound.requires_grad
    assert abs(float(estimate.kappa) / exact_kappa(problem("causal", 7, 4)) - 1) < 1e-8


# --- rank ----------------------------------------------------------------------------------------------------------


def test_one_token_has_no_softmax_to_differentiate():
    heads = problem("plain", 1, 4)
    estimate = ck.jacobian_condition(heads)
    assert float(estimate.kappa) == pytest.approx(1.0)
    assert estimate.status == Status.CONVERGED
    bound = ck.jacobian_bound(heads)
    assert bound.kappa_lambda == math.inf and bound.bound == math.inf


def test_more_outputs_than_independent_parameters_is_rank_deficient():
    """W_Q G and W_K G^-T give the same scores for every invertible G, so J has at most cols - head_dim^2 directions."""
    heads = problem("plain", 12, 3, features=4)
    values = torch.linalg.svdvals(jacobian(heads))
    rank = heads.cols - 3**2
    assert heads.rows >= rank
    assert values[rank - 1] > 1e-6 * values[0] > 1e6 * values[rank]
    for method in ("exact", "auto"):
        estimate = ck.jacobian_condition(heads, method=method)
        assert estimate.status == Status.RANK_DEFICIENT
        assert estimate.kappa == math.inf == estimate.high
        assert float(estimate.effective) == pytest.approx(float(values[0] / values[rank - 1]), rel=1e-9)
    assert "rank deficient" in estimate.failures()[0]
    lanczos = ck.jacobian_condition(heads, method="lanczos")
    assert lanczos.high == math.inf
    assert lanczos.status != Status.CONVERGED


@pytest.mark.parametrize("seed", [7, 44, 117])
def test_the_vector_of_the_smallest_value_has_nothing_left_of_the_largest(seed: int):
    """F06: at kappa 3e3 its quotient was 1e-6 off, by what it had of eigenvectors with 1e7 times its value."""
    heads = replace(
        problem("biases", 24, 8),
        softcap=3.0,
        sink=torch.zeros((), dtype=torch.float64),
        norm_q=HeadNorm("layer", randn(8, seed=200 + seed), None, 1e-2),
        x=randn(24, FEATURES, seed=100 + seed),
        b_k=randn(8, seed=300 + seed),
    )
    assert float(ck.jacobian_condition(heads, method="exact").kappa) == pytest.approx(exact_kappa(heads), rel=1e-8)


@pytest.mark.parametrize("value_dim", [7, 13])
def test_more_outputs_than_parameters_may_have_full_rank(value_dim: int):
    """J J^T then has null vectors whatever J is, and says nothing about sigma_min(J)."""
    weights = (randn(n, 3, seed=i) for i, n in ((1, 1), (2, 1), (3, value_dim)))
    heads = AttentionHeads(randn(12, 3), *weights, b_q=randn(1, seed=4), b_k=randn(1, seed=5))
    assert heads.rows > heads.cols and (heads.spread < value_dim) == (value_dim == 13)
    kappa = exact_kappa(heads)
    assert float(ck.jacobian_condition(heads).kappa) == pytest.approx(kappa, rel=1e-8)
    lanczos = ck.jacobian_condition(heads, method="lanczos")
    assert float(lanczos.low) <= kappa * (1 + 1e-9) and lanczos.high == math.inf
    assert lanczos.status == Status.TOLERANCE_NOT_MET and float(lanczos.kappa) == pytest.approx(kappa, rel=0.1)


def test_the_bound_can_lie_below_kappa():
    """Theorem 3.1 supposes full rank; where J loses it, kappa(J) is infinite and every factor of B(J) is finite."""
    heads = problem("plain", 12, 3, features=4)
    bound = ck.jacobian_bound(heads)
    assert bound.theorem
    assert math.isfinite(float(bound.kappa_x)) and math.isfinite(float(bound.kappa_lambda))
    # P itself is regular here: P X has rank 4 of 12, but P is 12 x 12.
    assert math.isfinite(float(bound.bound))
    assert float(bound.bound) < float(ck.jacobian_condition(heads).kappa)


def test_a_query_without_keys_has_output_zero():
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[0] = False
    heads = replace(problem("plain", 5, 4), mask=mask)
    assert float(attention_output(heads)[0].abs().max()) == 0.0
    assert ck.jacobian_condition(heads).status == Status.RANK_DEFICIENT
    additive = replace(heads, mask=torch.where(mask, 0.0, -torch.inf).double())
    torch.testing.assert_close(attention_output(additive), attention_output(heads))


# --- extremes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"w_q": 0.0},
        {"w_v": 0.0},
        {"w_k": 0.0},
        {"w_q": 0.0, "w_k": 0.0, "w_v": 0.0},
        {"w_q": 10.0, "w_k": 10.0},
        {"w_q": 1e150},
        {"w_q": 1e-300},
        {"w_v": 1e-300},
        {"softcap": 1e-2},
        {"softcap": 1e-8},
        {"softcap": 1e300},
        {"scale": 1e-300},
        {"scale": -1.0},
        {"scale": 0.0},
    ],
    ids=str,
)
def test_saturated_zero_and_tiny_heads_have_the_kappa_of_autograd(change: dict[str, float]):
    """F06, A18: a value within its bracket, or rank deficient; never a number in between."""
    heads = problem("plain", 7, 4)
    weights = {name: factor * getattr(heads, name) for name, factor in change.items() if name.startswith("w_")}
    heads = replace(heads, **(change | weights))
    values = torch.linalg.svdvals(jacobian(heads))
    noise = max(heads.rows, heads.cols) * 2.3e-16
    for method in ("exact", "lanczos"):
        got = ck.jacobian_condition(heads, method=method)
        if values[-1] <= noise * values[0]:
            assert got.high == math.inf and got.status != Status.CONVERGED
            assert got.status == Status.RANK_DEFICIENT or method == "lanczos"
        else:
            kappa = float(values[0] / values[-1])
            assert float(got.low) <= kappa * (1 + 1e-9) and kappa * (1 - 1e-9) <= float(got.high)
            assert method == "lanczos" or abs(float(got.kappa) / kappa - 1) < 1e-8 * max(1, kappa / 1e5)


def test_what_overflows_is_one_head_without_a_number():
    """A19: squares beyond float64 make LAPACK fail for the whole batch; a head of them is set apart."""
    heads = problem("plain", 7, 4)
    for name, factor in (("w_v", 1e160), ("w_v", 1e300), ("x", 1e200)):
        part = getattr(heads, name)
        whole = replace(heads, **{name: torch.stack((part, factor * part, part))})
        for method in ("exact", "lanczos"):
            got = ck.jacobian_condition(whole, method=method)
            assert got.kappa.isnan().tolist() == [False, True, False], (name, factor)
            assert int(got.status[1]) == Status.NON_FINITE
            torch.testing.assert_close(got.kappa[::2], ck.jacobian_condition(heads, method=method).kappa.expand(2))


def test_a_jacobian_of_zeros_has_no_kappa_over_the_rest():
    heads = replace(problem("plain", 5, 4), mask=torch.zeros(5, 5, dtype=torch.bool))
    for method in ("exact", "lanczos"):
        got = ck.jacobian_condition(heads, method=method)
        assert got.kappa == got.high == math.inf and got.low == 1 and got.status == Status.RANK_DEFICIENT
        assert got.effective.isnan() and got.sigma_max == 0
    limiting = ck.limiting_factor(heads)
    assert limiting.names() == [""] and limiting.gain == 1
    bad = replace(heads, mask=None, w_q=heads.w_q * torch.nan)
    assert ck.limiting_factor(bad).names() == [""] and ck.limiting_factor(bad).gain.isnan()


@pytest.mark.parametrize("method", ["exact", "lanczos"])
def test_no_heads_have_no_figures(method: str):
    """A10, A11: a rank may own no head."""
    heads = AttentionHeads(randn(5, 8), *(torch.zeros(0, 4, 8) for _ in range(3)))
    assert ck.jacobian_condition(heads, method=method).kappa.shape == (0,)
    assert ck.jacobian_bound(heads).bound.shape == (0,) and ck.limiting_factor(heads).names() == []
    assert jvp(heads, *heads.weights).shape == (0, 5, 4)


def test_masks_and_sinks_may_have_more_batch_dimensions_than_the_rest():
    heads = problem("plain", 5, 4)
    masks = torch.ones(3, 5, 5, dtype=torch.bool).tril(diagonal=0)
    masks[1] = True
    got = attention_output(replace(heads, mask=masks))
    torch.testing.assert_close(got[1], attention_output(heads))
    sinks = torch.tensor([-torch.inf, 0.0, 50.0])
    got = attention_output(replace(heads, sink=sinks))
    torch.testing.assert_close(got[0], attention_output(heads))
    assert bool((got[2].abs() < 1e-12).all())


# --- the bound -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "causal", "scale", "biases", "memory", "values", "sink", "channels"])
def test_every_factor_of_the_bound_is_that_of_the_svd(name: str):
    heads = problem(name, 6, 4)
    bound = ck.jacobian_bound(heads)

    def kappa(matrix: Tensor) -> float:
        values = torch.linalg.svdvals(matrix)
        return float(values[0] / values[-1])

    p = attention_probabilities(heads)
    memory = heads.x if heads.memory is None else heads.memory
    values = memory if heads.values is None else heads.values
    blocks = p.diag_embed() - p[:, :, None] * p[:, None, :]
    spectrum = torch.linalg.eigvalsh(blocks)
    support = (p > 0).sum(-1) + (heads.sink is not None)
    nonzero = torch.cat([row[len(row) - n + 1 :] for row, n in zip(spectrum, support, strict=True)])
    expected = {
        "kappa_x": kappa(heads.x),
        "kappa_memory": kappa(memory),
        "kappa_values": kappa(values),
        "kappa_p": kappa(p),
        "kappa_lambda": float(nonzero.max() / nonzero.min()),
        "kappa_q": kappa(heads.w_q),
        "kappa_k": kappa(heads.w_k),
        "kappa_v": kappa(heads.w_v),
    }
    for factor, value in expected.items():
        assert float(getattr(bound, factor)) == pytest.approx(value, rel=2e-6), factor
    e = expected
    scores = e["kappa_x"] * e["kappa_memory"] * e["kappa_values"] * e["kappa_lambda"] * e["kappa_v"]
    total = scores * (e["kappa_q"] + e["kappa_k"]) + e["kappa_values"] * e["kappa_p"]
    assert float(bound.bound) == pytest.approx(total, rel=1e-5)
    assert bound.theorem == (name in ("plain", "causal", "scale"))


def test_the_softmax_factor_keeps_its_accuracy_over_hundreds_of_orders():
    p = torch.tensor([[1e-300, 1.0]], dtype=torch.float64)
    # One non-zero eigenvalue, so kappa is 1 whatever the probabilities.
    assert float(softmax_condition(p)) == pytest.approx(1.0, rel=1e-9)
    tiny = 1e-200
    p = torch.tensor([[tiny, tiny, 1.0]], dtype=torch.float64)
    # Eigenvalues tiny (along e1 - e2) and 3 tiny (1 + O(tiny)).
    assert float(softmax_condition(p)) == pytest.approx(3.0, rel=1e-9)
    assert float(softmax_condition(torch.eye(3, dtype=torch.float64))) == math.inf
    # A sink that takes nothing changes nothing; one that takes s of two keys adds a root: s p for p of one key.
    torch.testing.assert_close(softmax_condition(p, torch.zeros(1)), softmax_condition(p))
    one = torch.tensor([[0.75], [0.5]], dtype=torch.float64)
    assert float(softmax_condition(one, 1 - one[:, 0])) == pytest.approx(0.25 / 0.1875, rel=1e-9)
    assert softmax_condition(torch.full((2, 3), torch.nan, dtype=torch.float64)).isnan()


@given(rows=st.integers(1, 4), keys=st.integers(1, 6), spread=st.floats(0, 8), seed=st.integers(0, 99))
def test_the_softmax_factor_agrees_with_eigenvalues(rows: int, keys: int, spread: float, seed: int):
    p = (spread * randn(rows, keys, seed=seed)).softmax(-1)
    values = torch.linalg.eigvalsh(p.diag_embed() - p[:, :, None] * p[:, None, :])[:, 1:]
    if keys == 1:
        assert float(softmax_condition(p)) == math.inf
    elif float(values.min()) > 1e-9:
        assert float(softmax_condition(p)) == pytest.approx(float(values.max() / values.min()), rel=1e-5)


def test_the_limiting_factor_is_the_largest_one_and_the_exact_gains_are_exact():
    heads = problem("plain", 6, 4)
    bad = replace(heads, w_k=heads.w_k * torch.tensor([1.0, 1.0, 1.0, 1e-4]).double()[:, None])
    limiting = ck.limiting_factor(bad)
    bound = ck.jacobian_bound(bad)
    assert limiting.names() == ["k"]
    assert float(limiting.gain) == pytest.approx(float(bound.bound / bound.without("k")))
    assert set(limiting.gains) == set(FACTORS)
    u, s, vh = torch.linalg.svd(bad.w_k, full_matrices=False)
    flat = bad.with_weights(bad.w_q, s.square().mean().sqrt() * u @ vh, bad.w_v)
    expected = ck.jacobian_condition(bad).kappa / ck.jacobian_condition(flat).kappa
    assert float(limiting.exact["k"]) == pytest.approx(float(expected), rel=1e-6)
    assert ck.limiting_factor(bound).names() == ["k"] and ck.limiting_factor(bound).exact is None


# --- Krylov methods ------------------------------------------------------------------------------------------------


def test_krylov_methods_find_the_ends():
    root = randn(3, 60, 60)
    maps = root @ root.mT
    values = torch.linalg.eigvalsh(maps)

    def product(u: Tensor) -> Tensor:
        return (maps @ u[..., None])[..., 0]

    ritz = largest(product, 3, 60, torch.device("cpu"), steps=60, tolerance=1e-14)
    torch.testing.assert_close(ritz.value, values[:, -1], rtol=1e-12, atol=0)
    torch.testing.assert_close(product(ritz.vector), ritz.value[:, None] * ritz.vector, rtol=0, atol=1e-4)
    short = largest(product, 3, 60, torch.device("cpu"), steps=12)
    assert bool((short.value <= values[:, -1] * (1 + 1e-12)).all())
    assert bool((values[:, -1] - short.value <= shortfall(60, 12) * values[:, -1]).all())
    diagonal = maps.diagonal(dim1=-2, dim2=-1)
    start = gaussian(60, torch.device("cpu")).expand(3, 60)
    vector = smallest(product, lambda r: r / diagonal, start, steps=60, tolerance=0.0)
    quotient = (product(vector) * vector).sum(-1)
    torch.testing.assert_close(quotient, values[:, 0], rtol=1e-6, atol=0)


def test_krylov_stops_at_an_invariant_space():
    ritz = largest(lambda u: 2.0 * u, 2, 50, torch.device("cpu"), steps=50)
    torch.testing.assert_close(ritz.value, torch.full((2,), 2.0).double())
    assert bool(ritz.complete.all())


def test_the_steps_that_are_promised_are_the_fewest_that_do():
    for n in (10, 1000, 10**6):
        for allowed in (0.01, 0.1, 0.5):
            steps = steps_for(n, allowed)
            assert shortfall(n, steps) <= allowed
            assert steps == n or shortfall(n, steps - 1) > allowed
    assert 0 < FAILURE < 1e-6


@pytest.mark.parametrize("name", ["plain", "causal", "memory", "sink", "channels, l2 norm"])
def test_the_preconditioner_is_the_block_diagonal(name: str):
    head = linearize(problem(name, 6, 4).select(torch.arange(1)))
    blocks = gram(head).view(1, 4, 6, 4, 6)
    for a in range(4):
        torch.testing.assert_close(value_blocks(head)[:, a], blocks[:, a, :, a], rtol=1e-11, atol=1e-12)


# --- cost, and arguments -------------------------------------------------------------------------------------------


def test_memory_stays_flat_and_small():
    """F17: 128 tokens, width 256, batch 4; J itself would be 4 x 8192 x 49152 numbers, 12 GB."""
    script = """
        import torch
        import conditioned_kernels as ck
        from conditioned_kernels.jacobian import jvp, vjp
        torch.set_num_threads(1)
        from conditioned_kernels.bench.machine import resident
        def peak(): return resident("VmHWM") / 2**20
        def run(x, d, steps, channels=False):
            heads = ck.AttentionHeads(x, *(torch.randn(d, x.shape[-1]) / 16 for _ in range(3)), channels=channels)
            if steps:
                ck.jacobian_condition(heads, method="lanczos", max_steps=steps)
                ck.jacobian_bound(heads)
            vjp(heads, jvp(heads, *heads.weights))
        run(torch.randn(1, 8, 16), 4, 4)
        start = peak()
        run(torch.randn(4, 128, 256), 64, 6)
        run(torch.randn(4, 128, 256), 64, 6, channels=True)
        first = peak()
        for _ in range(50):
            run(torch.randn(4, 128, 256), 64, 0)
        print(first - start, peak() - first)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    used, grown = map(float, done.stdout.split())
    assert used <= 200, f"{used} MiB"
    assert grown <= 20, f"{grown} MiB more after 50 repeats"


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w_q": torch.zeros(4, 5)}, ValueError, "w_q must have 8 columns"),
        ({"w_k": torch.zeros(3, 8)}, ValueError, "equal head_dim, got 4 and 3"),
        ({"b_v": torch.zeros(3)}, ValueError, r"b_v must be \(..., 4\)"),
        ({"mask": torch.zeros(6, 3)}, ValueError, r"mask must broadcast to \(..., 6, 6\)"),
        ({"values": torch.zeros(5, 8)}, ValueError, "values must have as many tokens as memory"),
        ({"x": torch.zeros(6, 8, dtype=torch.int64)}, TypeError, "x must have one of the dtypes"),
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor"),
        ({"x": torch.zeros(0, 8)}, ValueError, "must not be empty"),
        ({"softcap": -1.0}, ValueError, "softcap must be a positive"),
        ({"scale": math.inf}, ValueError, "scale must be finite"),
        ({"w_v": torch.zeros(2, 4, 8), "w_q": torch.zeros(3, 4, 8)}, ValueError, "must broadcast"),
        ({"rope": Rotary(torch.zeros(6, 3), torch.zeros(6, 3))}, ValueError, "rotated even"),
        ({"rope": Rotary(torch.zeros(5, 4), torch.zeros(5, 4))}, ValueError, "rope must have 6 tokens"),
        ({"rope": Rotary(torch.zeros(6, 4), torch.zeros(6, 4)), "memory": torch.zeros(6, 8)}, NoJacobian, "rope with"),
        # B23: a tokenizer's mask of ones and zeros is not what is added to logits.
        ({"mask": torch.ones(6, 6, dtype=torch.int64)}, TypeError, r"mask must be boolean.* pass mask.bool\(\)"),
        ({"mask": [[True]]}, TypeError, "mask must be a torch.Tensor, got list"),
        ({"mask": torch.ones(6, 6, device="meta")}, ValueError, "must be on one device, got cpu, meta"),
        ({"scale": True}, TypeError, "scale must be a number or a tensor"),
        ({"b_q": torch.zeros(4, dtype=torch.int64)}, TypeError, "must have one of the dtypes"),
        ({"b_q": torch.tensor(1.0)}, ValueError, r"b_q must be \(..., 4\)"),
        ({"norm_q": HeadNorm("rms", torch.ones(1))}, ValueError, r"norm_q.gain must be \(..., 4\)"),
        ({"norm_k": HeadNorm("rms", others=torch.ones(5), over=8)}, ValueError, r"norm_k.others must be \(..., 6\)"),
        ({"norm_q": torch.ones(4)}, TypeError, "norm_q must be a HeadNorm, got Tensor"),
        ({"rope": (torch.ones(6, 4), torch.ones(6, 4))}, TypeError, "rope must be a Rotary, got tuple"),
        ({"shared_keys": torch.zeros(6, 2)}, ValueError, "equal head_dim but for 2 shared keys, got 4 and 4"),
        ({"channels": True, "mask": torch.zeros(6, 6)}, NoJacobian, "over channels is not covered with mask"),
        ({"channels": True, "norm_q": HeadNorm("rms", torch.ones(4))}, NoJacobian, "not covered with gains of norms"),
        ({"channels": True, "w_v": torch.zeros(3, 8)}, ValueError, "equally many rows, got 4 and 3"),
    ],
)
def test_wrong_problems_are_refused_with_the_argument(change: dict[str, Any], error: type, message: str):
    given = {"x": torch.zeros(6, 8), **{name: torch.zeros(4, 8) for name in ("w_q", "w_k", "w_v")}}
    with pytest.raises(error, match=message):
        AttentionHeads(**(given | change))


def test_wrong_arguments_are_refused():
    heads = problem("plain", 6, 4)
    with pytest.raises(ValueError, match="method must be one of"):
        ck.jacobian_condition(heads, method="qr")
    with pytest.raises(ValueError, match="rtol must be a positive"):
        ck.jacobian_condition(heads, rtol=0)
    with pytest.raises(ValueError, match=r"dw_v must have shape \(..., 4, 40\)"):
        jvp(heads, heads.w_q, heads.w_k, heads.w_v.mT)
    with pytest.raises(ValueError, match=r"u must have shape \(..., 6, 4\)"):
        vjp(heads, heads.x)
    with pytest.raises(ValueError, match=r"dw_q must have shape .* the problem's \(3,\), got \(2, 4, 40\)"):
        jvp(replace(heads, w_q=heads.w_q.expand(3, 4, 40)), *(w.expand(2, 4, 40) for w in heads.weights))
    with pytest.raises(ValueError, match="max_steps must be an integer of at least 1, got 0"):
        ck.jacobian_condition(heads, method="lanczos", max_steps=0)
    for call in (ck.jacobian_condition, ck.jacobian_bound, ck.limiting_factor, attention_output):
        with pytest.raises(TypeError, match="heads must be an AttentionHeads, got Tensor"):
            call(heads.x)
    with pytest.raises(ValueError, match="factor must be one of 'x', 'p'"):
        ck.jacobian_bound(heads).without("z")
    with pytest.raises(ValueError, match="kind must be one of"):
        HeadNorm("batch")
    for eps in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="eps must be a finite number"):
            HeadNorm("rms", eps=eps)
    with pytest.raises(ValueError, match="others and over go together"):
        HeadNorm("layer", others=torch.ones(6), over=8)
    large = AttentionHeads(torch.zeros(300, 8), *(torch.zeros(32, 8) for _ in range(3)))
    with pytest.raises(ValueError, match="use method='lanczos'"):
        ck.jacobian_condition(large, method="exact")

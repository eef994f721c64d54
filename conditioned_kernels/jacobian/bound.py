"""The bound of Theorem 3.1, factor by factor, and the factor that matters most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import _validate
from ..condition import condition_number
from ..orthogonalize import orthogonalize
from .estimate import EXACT_ROWS, jacobian_condition
from .heads import AttentionHeads, checked, tensors
from .linear import linearize

FACTORS = ("x", "p", "lambda", "q", "k", "v")
"""The factors of the bound, in the order of :class:`LimitingFactor`'s codes."""

_BISECTIONS = 80
"""Of a bracket whose ends' logarithms are at most 745 apart: to 6e-22, below float64's resolution."""


@dataclass(frozen=True, eq=False)
class JacobianBound:
    """The factors of B(J); float64 tensors of the batch shape.

    Attributes
    ----------
    kappa_x : of the tokens that queries are made of.
    kappa_memory, kappa_values : of the tokens that keys and values are made of; kappa_x in self-attention.
    kappa_p : of the probabilities, inf where P is singular.
    kappa_lambda : of the softmax derivative, over its non-zero spectrum: every row's Lambda(p) = diag(p) - p p^T has
        the null vector of ones, and one more per masked key. inf where no row sees two keys, since Lambda is 0 there.
        With a sink p sums to less than 1, and the vector of ones is no null vector.
    kappa_q, kappa_k, kappa_v : of the weights.
    bound : B(J).
    theorem : whether Theorem 3.1 is about this problem: self-attention with a scale and a mask, but without biases,
        rotation, norms, soft cap, sink or shared keys, over tokens. Elsewhere ``bound`` is the same formula and bounds
        nothing.
    """

    kappa_x: Tensor
    kappa_memory: Tensor
    kappa_values: Tensor
    kappa_p: Tensor
    kappa_lambda: Tensor
    kappa_q: Tensor
    kappa_k: Tensor
    kappa_v: Tensor
    bound: Tensor
    theorem: bool

    def without(self, factor: str) -> Tensor:
        """B(J) with one of :data:`FACTORS` set to 1."""
        _validate.choice(factor, "factor", FACTORS)
        one = torch.ones_like(self.bound)
        replaced = {
            "x": {"kappa_x": one, "kappa_memory": one, "kappa_values": one},
            **{name: {f"kappa_{name}": one} for name in FACTORS[1:]},
        }[factor]
        return _formula(**{name: getattr(self, name) for name in _NAMES} | replaced)


_NAMES = tuple(name for name in JacobianBound.__annotations__ if name.startswith("kappa_"))


@dataclass(frozen=True, eq=False)
class LimitingFactor:
    """Which factor would lower kappa(J) most if it were 1.

    Attributes
    ----------
    code : int64 tensor of the batch shape, an index into :data:`FACTORS`; -1 where no single factor would lower it
        (two are infinite, or B(J) is NaN).
    gain : B(J) divided by B(J) with that factor 1; 1 or NaN where there is none.
    gains : the same for every factor, by name.
    exact : kappa(J) divided by the exact kappa(J) after the change, for "x", "q", "k" and "v", whose matrix is replaced
        by its polar factor times its root mean square singular value; None where J is too large. P and Lambda cannot be
        changed on their own, so they have no such number.
    """

    code: Tensor
    gain: Tensor
    gains: dict[str, Tensor]
    exact: dict[str, Tensor] | None

    def names(self) -> list[str]:
        """The factors' names of the flattened batch, "" where there is none; reads the device."""
        return [(*FACTORS, "")[code] for code in self.code.flatten().tolist()]


def jacobian_bound(heads: AttentionHeads) -> JacobianBound:
    """B(J) = kappa(X)^3 kappa(Lambda(P)) kappa(W_V) (kappa(W_Q) + kappa(W_K)) + kappa(X) kappa(P), and its factors.

    With keys and values of other tokens Y and Z, kappa(X)^3 is kappa(X) kappa(Y) kappa(Z), and the last kappa(X) is
    kappa(Z), as in the theorem's proof. kappa of a singular matrix is inf, of a non-finite one NaN, and so is B(J).

    Where kappa(Lambda) is taken over the non-zero spectrum, as it has to be, the theorem's proof has a gap: the null
    vectors of Lambda are not seen. B(J) < kappa(J) does occur, where J is rank deficient or nearly so.

    *Accuracy.* Every factor to 1e-6 or better; kappa(Lambda) by bisection to rounding, at any ratio of probabilities.
    *Cost.* tokens keys (features + head_dim) flops and one small Gram matrix per factor, in float64.
    *Source.* Saratchandran and Lucey, ICLR 2026, Theorem 3.1.
    """
    shape = checked(heads).shape
    with torch.inference_mode(False), torch.no_grad():
        head = linearize(heads)
        p = head.p.expand(*shape, *head.p.shape[-2:])
        memory = heads.x if heads.memory is None else heads.memory
        values = memory if heads.values is None else heads.values
        kappa_x = _kappa(heads.x)
        kappa_memory = kappa_x if memory is heads.x else _kappa(memory)
        factors = {
            "kappa_x": kappa_x,
            "kappa_memory": kappa_memory,
            "kappa_values": kappa_memory if values is memory else _kappa(values),
            "kappa_p": _kappa(p),
            "kappa_lambda": softmax_condition(head.p, head.sink),
            **{f"kappa_{role}": _kappa(weight) for role, weight in zip("qkv", heads.weights, strict=True)},
        }
        factors = {name: value.expand(shape) for name, value in factors.items()}
    plain = {id(heads.x), *map(id, heads.weights), id(heads.mask), id(heads.scale)}
    theorem = heads.softcap is None and all(id(each) in plain for each, _ in tensors(heads))
    theorem = theorem and heads.norm_q is None and heads.norm_k is None and not heads.channels
    return JacobianBound(**factors, bound=_formula(**factors), theorem=theorem)


def limiting_factor(problem: AttentionHeads | JacobianBound) -> LimitingFactor:
    """Which factor of B(J) would lower kappa(J) most if it were 1: by the bound, and by exact kappa where affordable.

    The bound ranks all six factors. Given the heads, and not only their bound, and at most 2048 rows of J, the exact
    kappa(J) is also computed with X, W_Q, W_K and W_V in turn replaced by a matrix with kappa 1 of the same size
    (``exact``); the two rankings often differ, and ``code`` follows the bound.
    """
    bound = problem if isinstance(problem, JacobianBound) else jacobian_bound(problem)
    # inf / inf is 1: the factor that makes B infinite is not this one.
    gains = {
        name: torch.where(
            bound.bound.isnan(), torch.nan, (bound.bound / bound.without(name)).nan_to_num(1.0, torch.inf)
        )
        for name in FACTORS
    }
    stacked = torch.stack(list(gains.values()))
    gain = stacked.amax(0)
    code = torch.where(gain > 1, stacked.argmax(0), -1)
    exact = None
    if isinstance(problem, AttentionHeads) and problem.rows <= EXACT_ROWS:
        exact = _exact_gains(problem)
    return LimitingFactor(code, gain, gains, exact)


def _exact_gains(heads: AttentionHeads) -> dict[str, Tensor]:
    before = jacobian_condition(heads, method="exact").kappa
    w_q, w_k, w_v = heads.weights
    changed = {
        "q": heads.with_weights(_flattened(w_q), w_k, w_v),
        "k": heads.with_weights(w_q, _flattened(w_k), w_v),
        "v": heads.with_weights(w_q, w_k, _flattened(w_v)),
    }
    if heads.memory is None and heads.values is None:
        changed["x"] = heads.with_tokens(_flattened(heads.x))
    return {name: before / jacobian_condition(each, method="exact").kappa for name, each in changed.items()}


def _flattened(matrix: Tensor) -> Tensor:
    """The polar factor times the root mean square singular value; a non-finite matrix stays non-finite."""
    matrix = matrix.double()
    finite = matrix.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    size = torch.linalg.matrix_norm(matrix)[..., None, None] / min(matrix.shape[-2:]) ** 0.5
    return torch.where(finite, orthogonalize(torch.where(finite, matrix, 0.0), method="polar") * size, torch.nan)


def _kappa(matrix: Tensor) -> Tensor:
    return condition_number(matrix.double(), rtol=1e-6).kappa


def _formula(
    kappa_x: Tensor,
    kappa_memory: Tensor,
    kappa_values: Tensor,
    kappa_p: Tensor,
    kappa_lambda: Tensor,
    kappa_q: Tensor,
    kappa_k: Tensor,
    kappa_v: Tensor,
) -> Tensor:
    scores = kappa_x * kappa_memory * kappa_values * kappa_lambda * kappa_v * (kappa_q + kappa_k)
    return scores + kappa_values * kappa_p


def softmax_condition(p: Tensor, sink: Tensor | None = None) -> Tensor:
    """kappa of the block-diagonal matrix of all rows' diag(p) - p p^T, over its non-zero spectrum, (...).

    With sum(p) = 1 the non-zero eigenvalues are the roots of ``sum_i p_i / (p_i - lambda)``, one between each two
    neighbours of the sorted non-zero p; the first and the last are found by bisection of log(lambda), which loses no
    accuracy where probabilities differ by many orders. What goes to a ``sink`` (..., tokens), 1 - sum(p), adds the term
    ``sink / (0 - lambda)``, and with it a root below the smallest p.
    """
    weights = poles = p.double().sort(-1).values
    if sink is not None:
        zeros = (poles <= 0).sum(-1, keepdim=True)
        poles = torch.nn.functional.pad(poles, (1, 0))
        weights = poles.scatter(-1, zeros, sink.double()[..., None])
    keys = poles.shape[-1]
    support = (weights > 0).sum(-1, keepdim=True)
    if keys < 2:
        return torch.where(poles.isfinite().all(-1).all(-1), torch.inf, torch.nan)
    first = (keys - support).clamp_max(keys - 2)
    low = _root(weights, poles, poles.gather(-1, first), poles.gather(-1, first + 1))
    high = _root(weights, poles, poles[..., -2:-1], poles[..., -1:])
    counts = support[..., 0] > 1
    smallest = torch.where(counts, low, torch.inf).amin(-1)
    largest = torch.where(counts, high, 0.0).amax(-1)
    kappa = torch.where(counts.any(-1), largest / smallest, torch.inf)
    return torch.where(poles.isfinite().all(-1).all(-1), kappa, torch.nan)


def _root(weights: Tensor, poles: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The root of the increasing ``sum_i w_i / (pole_i - lambda)`` in [low, high], neighbours; (..., rows)."""
    tiny = torch.finfo(poles.dtype).tiny
    below, above = low.clamp_min(tiny).log2(), high.clamp_min(tiny).log2()
    for _ in range(_BISECTIONS):
        middle = (below + above) / 2
        difference = poles - middle.exp2()
        # p_i = lambda happens only at the ends of the bracket, where it says nothing new.
        terms = torch.where(difference == 0, 0.0, weights / difference)
        rising = terms.sum(-1, keepdim=True) > 0
        below, above = torch.where(rising, below, middle), torch.where(rising, middle, above)
    return ((below + above) / 2).exp2()[..., 0]

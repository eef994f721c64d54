"""Mimetic initialization (Trockman and Kolter, ICML 2023): W_Q W_K^T near the identity, W_V W_O near its negative."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..heads.discover import AttentionLayer, Discovery, Where
from ..heads.layout import OUTPUT, POSITION, LayoutFunction
from ..sampling import philox_normal, resolve_seed, stream_key
from .apply import Draw, Scheme, named_errors
from .init_report import InitReport
from .positions import position_targets, sinusoids
from .scope import Scope
from .target import WHOLE, Target, resolve

EXACT = 1024
"""Widest matrix whose Gram matrix is decomposed whole (0.1 s at 768 on one core); wider ones by block Krylov."""

BLOCKS = 6
"""Krylov blocks, each half as wide again as the rank: what is lost beyond the best factors is below 1e-3 in norm."""

GLOBAL = "global"
"""The part of the projections of global attention."""

PAIRS = (("qk", "q", "k"), ("qk", f"q.{GLOBAL}", f"k.{GLOBAL}"), ("vo", "v", OUTPUT))
"""Which argument, and the two labels whose product it gives."""

Pair = tuple[float, float]


def mimetic_(
    model: nn.Module,
    *,
    qk: Pair | None = (0.7, 0.7),
    vo: Pair | None = (0.4, 0.4),
    positions: str | None = None,
    seed: int = 0,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
    include_frozen: bool = False,
    overwrite: bool = False,
    generator: torch.Generator | None = None,
) -> InitReport:
    """Make, in place, every head's W_Q W_K^T resemble the identity and every layer's W_V W_O its negative.

    With Z1, Z2 standard normal, of a stream of their own for every head and layer, D the width and d the rows of a
    head (Trockman and Kolter, "Mimetic Initialization of Self-Attention Layers", ICML 2023)::

        W_Q W_K^T  the best approximation of rank d of     a1 Z1 / sqrt(D) + b1 I      per head
        W_V W_O    the best approximation of rank h d of   a2 Z2 / sqrt(D) - b2 I      per layer

    each by the truncated SVD U S V^T as W_Q = U S^(1/2), W_K = V S^(1/2), and W_V = U S^(1/2), W_O = S^(1/2) V^T.
    Everything else stays bit-identical, and so does the whole model if the call fails.

    Parameters
    ----------
    model, seed, where, layouts, strict, include_frozen, overwrite, generator : as for :func:`conditioned_`.
    qk : (a1, b1), each at least 0 and not both 0; the default is the paper's for vision. None leaves Q and K alone.
    vo : (a2, b2), likewise; b2 is subtracted. None leaves V and W_O alone.
    positions : "sinusoidal" also writes sin and cos of Vaswani et al. (2017) into the model's learned table of absolute
        positions, which the paper needs for its full effect; or the name of such a parameter (..., positions, D).

    Returns
    -------
    InitReport; W_O has entries with role "o", whose heads are (head_dim, out_features); position tables are in
    ``others``.

    Raises
    ------
    ValueError
        besides the errors of :func:`conditioned_`: for a layer whose W_O is not known, for low-rank attention (MLA),
        whose W_Q W_K^T has other factors, for a layer of which only a part is tied to another, and for
        ``positions`` where there is no such table.

    Notes
    -----
    *Grouped K/V heads.* Of all factors with the smallest squared error over the group, those of the smallest norm: the
    targets of the group's g query heads stacked to (g D, D) have one truncated SVD, whose V part is the shared W_K and
    whose U part holds the W_Q. For W_V W_O, the rank is that of the distinct value heads, and the g query heads of a
    group share one block of W_O; V and W_O have equal norms.
    *Widths.* Where a product is not square (memory of another width), I is the rectangular identity and D the larger
    width. Where h d > D, singular value i goes to the rows i, i + D, ... of the stacked heads in equal parts, so that
    no head is dead. *Variants.* QK norms, rotary embeddings, temperatures, gates and norms between V and W_O are not
    looked at: the equations hold for the weights. Channel attention likewise. Projections of relative positions are
    skipped; those of global attention (Longformer) are pairs of their own, and its values are the local ones.
    *Accuracy.* Up to width 1024, and where the rank is over half the width, exact to rounding. Beyond, the product's
    error exceeds the best one by less than 0.1 % in Frobenius norm (2e-5 to 1e-4 measured at 1600 x 64). *Cost.* per
    head one eigendecomposition of a D x D matrix, or about 60 D^2 d flops beyond width 1024 (on one core 0.1 s at
    768 x 64, 0.25 s at 1600 x 64, 3 s at 4096 x 128); per layer one SVD of W_V W_O, 1.5 s at width 1600. Factors
    are unique to the signs of their columns, which make the largest entry of each of W_K's and W_O's positive.
    """
    scales = {"qk": _scales(qk, "qk"), "vo": _scales(vo, "vo")}
    seed = resolve_seed(seed, generator)
    layers: dict[int, dict[str, Target]] = {}
    made: dict[tuple[str, str], Draw] = {}

    def choose(model: nn.Module, found: Discovery) -> list[Target]:
        for layer in found.layers:
            _check(layer, vo=vo is not None)
        tables = [] if positions is None else position_targets(model, positions)
        return [*resolve(found, outputs=True), *tables]

    def prepare(targets: list[Target]) -> None:
        layers.clear()
        for target in targets:
            layers.setdefault(id(target.layer), {})[target.stream_role] = target

    def draw(target: Target) -> Draw:
        if target.projection.role == WHOLE:
            return Draw(sinusoids(target.heads), "sinusoidal")
        if target.projection.part == POSITION:
            return Draw(None, "projection of relative positions, whose product has no identity to resemble")
        if target.key not in made:
            # One layer at a time: a sharded model is larger than what a rank may hold.
            made.clear()
            layer = layers[id(target.layer)]
            for kind, first, second in PAIRS:
                made.update(_draw_pair(layer, kind, first, second, scales[kind], seed))
            if "v.global" in layer and "v" in layer:
                made[layer["v.global"].key] = made[layer["v"].key]
        return made[target.key]

    scope = Scope(where, layouts, strict, include_frozen, overwrite)
    return Scheme("mimetic", seed, draw, prepare, choose, whole=positions is not None).apply(model, scope)


def _scales(pair: Pair | None, name: str) -> Pair | None:
    if pair is None:
        return None
    if (
        not isinstance(pair, Sequence)
        or len(pair) != 2
        or not all(isinstance(x, int | float) and math.isfinite(x) and x >= 0 for x in pair)
        or not any(pair)
    ):
        raise ValueError(f"{name} must be None or (alpha, beta), two finite numbers >= 0 and not both 0, got {pair!r}")
    return float(pair[0]), float(pair[1])


def _check(layer: AttentionLayer, *, vo: bool) -> None:
    name = layer.name or "the model itself"
    parts = sorted({each.part for each in layer.projections} - {"", GLOBAL, POSITION})
    if parts:
        raise ValueError(
            f"{name} ({layer.family}) has low-rank attention ({', '.join(parts)}): its W_Q W_K^T is a product of "
            "shared factors, which mimetic initialization does not define; leave it out with where="
        )
    if vo and layer.output is None and any(each.role == "v" for each in layer.projections):
        raise ValueError(
            f"W_O of {name} ({layer.family}) is not known: {layer.no_output}. Pass vo=None to leave V and W_O alone, "
            'give its layout with a view under "o" (query heads, head_dim, out_features), or leave it out with where='
        )


def _draw_pair(
    layer: Mapping[str, Target], kind: str, first: str, second: str, scales: Pair | None, seed: int
) -> dict[tuple[str, str], Draw]:
    """What becomes of the two targets whose product is given, by their keys."""
    present = [layer[label] for label in (first, second) if label in layer]
    if scales is None or not present:
        return {target.key: Draw(None, f"{kind}=None") for target in present}
    if len(present) == 1:
        missing = second if first in layer else first
        raise ValueError(
            f"{present[0].name} ({present[0].stream_role}): its partner {missing!r} is tied to another layer's, so "
            "their product cannot be chosen; untie it, or leave the layer out with where="
        )
    one, other = present
    with named_errors(one):
        values = (_query_key if kind == "qk" else _value_output)(one, other, scales, seed)
    made = f"mimetic, {scales[0]:g} Z / sqrt(D) {'+' if kind == 'qk' else '-'} {scales[1]:g} I"
    return {target.key: Draw(value, made) for target, value in zip(present, values, strict=True)}


def _query_key(query: Target, key: Target, scales: Pair, seed: int) -> tuple[Tensor, Tensor]:
    rows, group = query.shape[-2], _group(query, key)
    new_query, new_key = (torch.empty(x.count, *x.shape[-2:], dtype=x.work, device=x.device) for x in (query, key))
    for head in range(key.count):
        mine = range(head * group, (head + 1) * group)
        stacked = torch.cat(list(product_targets(query, mine, (query.shape[-1], key.shape[-1]), scales, seed)))
        left, right = balanced_factors(stacked, rows, stream_key(seed, query.name, f"mimetic/start/{head}"))
        new_query[mine.start : mine.stop] = left.unflatten(0, (group, -1)).mT
        new_key[head] = right
    return new_query, new_key


def _value_output(value: Target, output: Target, scales: Pair, seed: int) -> tuple[Tensor, Tensor]:
    heads, (rows, width), group = value.count, value.shape[-2:], _group(output, value)
    (whole,) = product_targets(output, range(1), (width, output.shape[-1]), (scales[0], -scales[1]), seed)
    left, right = balanced_factors(whole, heads * rows, stream_key(seed, output.name, "mimetic/start"))
    # The group's copies of one block add up; of all shares with that sum, these give V and W_O equal norms.
    new_value = left.mT.unflatten(0, (heads, rows)) * group**-0.25
    new_output = right.unflatten(0, (heads, rows)).repeat_interleave(group, 0) * group**-0.75
    return new_value, new_output


def product_targets(target: Target, heads: range, shape: tuple[int, int], scales: Pair, seed: int) -> Iterator[Tensor]:
    """alpha Z / sqrt(D) + beta I of each head, ``shape``, with Z from the stream of ``target``."""
    for head in heads:
        key = stream_key(seed, target.name, f"mimetic/{target.stream_role}")
        samples = philox_normal(key, range(head, head + 1), range(math.prod(shape)), device=target.device)
        whole = samples.view(shape).to(target.work).mul_(scales[0] / math.sqrt(max(shape)))
        whole.diagonal().add_(scales[1])
        yield whole


def balanced_factors(whole: Tensor, rank: int, key: int = 0) -> tuple[Tensor, Tensor]:
    """``whole`` (rows, cols) as left (rows, rank) @ right (rank, cols), the best approximation of that rank.

    left = U S^(1/2), right = S^(1/2) V^T of the truncated SVD. A rank above the short side has singular value i spread
    over the columns i, i + short, ... in equal parts. See :func:`mimetic_` for accuracy and cost; ``key`` is that of
    the Krylov iteration's start.
    """
    short = min(whole.shape)
    kept = min(rank, short)
    if 2 * kept > short:
        u, sigma, vh = torch.linalg.svd(whole, full_matrices=False)
        root = sigma[:kept].sqrt()
        left, right = u[:, :kept] * root, root[:, None] * vh[:kept]
    else:
        basis, product = _right_vectors(whole, kept, key)
        root = torch.linalg.vector_norm(product, dim=0).sqrt()
        left, right = product / root, (basis * root).mT
    largest = right.gather(1, right.abs().argmax(1, keepdim=True))[:, 0]
    left, right = left * largest.sign(), right * largest.sign()[:, None]
    if rank > kept:
        place = torch.arange(rank, device=whole.device) % kept
        share = place.bincount()[place].to(whole.dtype).rsqrt()
        left, right = left[:, place] * share, right[place] * share[:, None]
    return left, right


def _right_vectors(whole: Tensor, rank: int, key: int) -> tuple[Tensor, Tensor]:
    """The first ``rank`` right singular vectors (cols, rank), the largest first, and ``whole`` times them."""
    cols = whole.shape[1]
    block = rank + rank // 2
    if cols <= max(EXACT, BLOCKS * block):
        basis = torch.linalg.eigh(whole.mT @ whole).eigenvectors[:, -rank:].flip(1)
        return basis, whole @ basis
    samples = philox_normal(key, range(1), range(cols * block), device=whole.device)
    newest = torch.linalg.qr(samples.view(cols, block).to(whole.dtype)).Q
    blocks = [newest]
    for _ in range(BLOCKS):
        newest = torch.linalg.qr(whole.mT @ (whole @ newest)).Q
        blocks.append(newest)
    space = torch.linalg.qr(torch.cat(blocks, 1)).Q
    inside = whole @ space
    rotation = torch.linalg.eigh(inside.mT @ inside).eigenvectors[:, -rank:].flip(1)
    return space @ rotation, inside @ rotation


def _group(wide: Target, shared: Target) -> int:
    """Query heads per K/V head."""
    if wide.shape[-2] != shared.shape[-2] or wide.count % shared.count:
        raise ValueError(
            f"{wide.count} query heads of {wide.shape[-2]} rows do not share {shared.count} K/V heads of "
            f"{shared.shape[-2]} rows evenly"
        )
    return wide.count // shared.count

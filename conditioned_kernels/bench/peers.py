"""What a user would otherwise call, one row each.

Every row is run on the same input in the same process as ours. A row whose package is missing, or that cannot run on
the device, is listed with the reason; one that returns less than was asked for states by how much, and is marked.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .case import POLAR, RESIDUAL, TOP, Contestant, Errors, Skipped

Run = Callable[[], Any]
ErrorsOf = Callable[[Any], Errors]


@dataclass(frozen=True)
class Peer:
    """One way to do one kind of job.

    Attributes
    ----------
    name : as the table shows it.
    job : "polar", "qr", "random", "samples", "kappa" or "top" (sigma_max alone).
    make : binds it to an input (heads, rows, cols); what it returns is timed. ``random`` gets a tensor to be like.
    package : the module it needs.
    stated, note : as of :class:`~.case.Contestant`.
    halves : takes float16 and bfloat16 as they are; otherwise they are cast to float32 and back, on its time.
    devices : where it runs.
    few : by device, the most heads x rows x cols^2 it is given; it then does that share of the heads, or nothing if
        that is less than half a head.
    """

    name: str
    job: str
    make: Callable[[Tensor], Run]
    package: str = "torch"
    stated: Errors = field(default_factory=dict)
    note: str = ""
    halves: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    few: Mapping[str, float] = field(default_factory=dict)


INSTALL = {
    "gram_newton_schulz": "pip install --no-deps gram-newton-schulz",
    "emerging_optimizers": "pip install emerging-optimizers, which needs Python 3.12 or newer",
}
"""How to get what the extra ``bench`` does not bring."""


def missing(package: str) -> str:
    """Why ``package`` cannot be used; "" if it can."""
    try:
        import_module(package)
    except Exception as error:  # what a foreign package raises on import is its own affair
        remedy = INSTALL.get(package, "pip install 'conditioned_kernels[bench]'")
        absent = isinstance(error, ModuleNotFoundError) and error.name == package.partition(".")[0]
        why = "is not installed" if absent else f"cannot be imported ({type(error).__name__}: {error})"
        return f"{package} {why} for Python {sys.version_info.major}.{sys.version_info.minor}: {remedy}"
    return ""


def contestant(peer: Peer, weights: Tensor, errors: Callable[[int], ErrorsOf]) -> Contestant | Skipped:
    """``peer`` on ``weights``; ``errors(k)`` judges a result for the first k heads."""
    device = weights.device.type
    if device not in peer.devices:
        return Skipped(peer.name, f"it runs on {' and '.join(peer.devices)} only, not on {device}")
    if why := missing(peer.package):
        return Skipped(peer.name, why)
    heads, rows, cols = weights.shape
    most = peer.few.get(device, math.inf) / (rows * cols**2)
    if most < 0.5:
        return Skipped(peer.name, f"one head of {rows}x{cols} takes it longer than the suite has for it on a {device}")
    used = heads if most >= heads else max(1, int(most))
    given = weights[:used]
    cast = given.dtype.itemsize < 4 and not peer.halves
    try:
        run = _through_float32(peer.make, given) if cast else peer.make(given)
    except (ImportError, AttributeError) as error:  # a private name that another version moved
        return Skipped(peer.name, f"this {peer.package} lacks what it needs: {error}")
    return Contestant(peer.name, run, errors(used), peer.stated, peer.note, used / heads)


def _through_float32(make: Callable[[Tensor], Run], weights: Tensor) -> Run:
    """Cast, run, and cast back what has the input's shape, all of it timed."""

    def run() -> Any:
        result = make(weights.float())()
        return result.to(weights.dtype) if isinstance(result, Tensor) and result.shape == weights.shape else result

    return run


# --- orthogonal factors ------------------------------------------------------------------------------------------


def svd_polar(weights: Tensor) -> Tensor:
    """U V^H of the thin SVD: what Algorithm 1 does with its draw."""
    u, _, vh = torch.linalg.svd(weights, full_matrices=False)
    return u @ vh


def signed_qr(matrix: Tensor) -> Tensor:
    """What nn.init.orthogonal_ does with its draw."""
    q, r = torch.linalg.qr(matrix)
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Run]:
    """Head after head, as a function of matrices is used."""
    return lambda weights: lambda: torch.stack([function(head) for head in weights])


def _numpy_svd(weights: Tensor) -> Run:
    import numpy as np

    def run() -> Tensor:
        u, _, vh = np.linalg.svd(weights.numpy(), full_matrices=False)
        return torch.from_numpy(u @ vh)

    return run


def _numpy_qr(weights: Tensor) -> Run:
    import numpy as np

    def run() -> Tensor:
        q, r = np.linalg.qr(weights.numpy())
        return torch.from_numpy(q * np.sign(np.diagonal(r, axis1=-2, axis2=-1))[:, None, :])

    return run


def _scipy_polar(weights: Tensor) -> Run:
    from scipy.linalg import polar

    return lambda: torch.stack([torch.from_numpy(polar(head)[0]) for head in weights.numpy()])


def _scipy_qr(weights: Tensor) -> Run:
    import numpy as np
    from scipy.linalg import qr

    def one(head: Any) -> Tensor:
        q, r = qr(head, mode="economic")
        return torch.from_numpy(q * np.sign(np.diagonal(r)))

    return lambda: torch.stack([one(head) for head in weights.numpy()])


def _muon(weights: Tensor) -> Run:
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz

    coefficients = (DEFAULT_A, DEFAULT_B, DEFAULT_C)
    return _each(lambda head: _zeropower_via_newtonschulz(head, coefficients, 5, EPS).to(head.dtype))(weights)


def _gram_newton_schulz(weights: Tensor) -> Run:
    from gram_newton_schulz import GramNewtonSchulz

    try:
        iterate = GramNewtonSchulz(ns_use_kernels=weights.is_cuda, compile_kwargs=None)
    except ImportError:  # its kernels need a package of their own
        iterate = GramNewtonSchulz(ns_use_kernels=False, compile_kwargs=None)
    return lambda: iterate(weights)


def _emerging_optimizers(weights: Tensor) -> Run:
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    return _each(lambda head: newton_schulz(head, 5))(weights)


# --- random semi-orthogonal matrices -----------------------------------------------------------------------------


def orthogonal_loop(like: Tensor) -> Run:
    """nn.init.orthogonal_ on each head."""
    out = torch.empty_like(like)

    def run() -> Tensor:
        for head in out:
            nn.init.orthogonal_(head)
        return out

    return run


def _orthogonal_whole(like: Tensor) -> Run:
    """nn.init.orthogonal_ on whole weights of as many heads as are square together: one layer's, in most models."""
    heads, rows, cols = like.shape
    together = max(1, rows // cols)
    sizes = [min(together, heads - start) * cols for start in range(0, heads, together)]
    weights = [torch.empty(rows, size, dtype=like.dtype, device=like.device) for size in sizes]

    def run() -> list[Tensor]:
        return [nn.init.orthogonal_(weight) for weight in weights]

    return run


def _geotorch(like: Tensor) -> Run:
    from geotorch import Stiefel

    manifold = Stiefel(like.shape).to(like.device)

    def run() -> Tensor:
        with torch.no_grad():
            return manifold.sample("uniform")

    return run


def _numpy_normal(like: Tensor) -> Run:
    import numpy as np

    generator = np.random.Generator(np.random.Philox(0))
    return lambda: torch.from_numpy(generator.standard_normal(like.numel(), dtype=np.float32))


# --- condition numbers -------------------------------------------------------------------------------------------


def _ratio(values: Tensor) -> Tensor:
    return values[..., 0] / values[..., -1]


def _gram_eigenvalues(weights: Tensor) -> Tensor:
    values = torch.linalg.eigvalsh(weights.mT @ weights)
    return (values[..., -1] / values[..., 0]).sqrt()


def _numpy_cond(weights: Tensor) -> Run:
    import numpy as np

    return lambda: torch.from_numpy(np.linalg.cond(weights.numpy()))


def _scipy_svdvals(weights: Tensor) -> Run:
    from scipy.linalg import svdvals

    return lambda: _ratio(torch.stack([torch.from_numpy(svdvals(head)) for head in weights.numpy()]))


def _skerch(weights: Tensor) -> Run:
    from skerch.algorithms import ssvd

    def one(head: Tensor) -> Tensor:
        values = ssvd(head, head.device, head.dtype, head.shape[-1])[1]
        return values.max() / values.min()

    return _each(one)(weights)


def _cola(weights: Tensor) -> Run:
    import cola
    from cola.linalg.decompositions.lanczos import lanczos_eigs

    def one(head: Tensor) -> Tensor:
        dense = cola.ops.Dense(head)
        values = lanczos_eigs(cola.PSD(dense.T @ dense), max_iters=head.shape[-1], tol=1e-7)[0].real
        return (values.max() / values.min()).sqrt()

    return _each(one)(weights)


def _spectral_norm(weights: Tensor) -> Run:
    """sigma_max as the parametrization leaves it: each read of ``weight`` in training makes its power iterations."""
    from torch.nn.utils.parametrizations import spectral_norm

    modules = []
    for head in weights:
        linear = nn.Linear(head.shape[1], head.shape[0], bias=False, device=head.device, dtype=head.dtype)
        with torch.no_grad():
            linear.weight.copy_(head)
        modules.append(spectral_norm(linear, n_power_iterations=1))
    norms = torch.linalg.matrix_norm(weights)

    def run() -> Tensor:
        with torch.no_grad():
            return norms / torch.stack([torch.linalg.matrix_norm(module.weight) for module in modules])

    return run


SLOW = {"cpu": 1e8, "cuda": 1e9}
HALF_PRECISION = {"cpu": 2e7}
LOOP_ON_GPU = {"cuda": 1e9}

PEERS: tuple[Peer, ...] = (
    Peer("linalg.svd, U Vᵀ", "polar", lambda w: lambda: svd_polar(w), few=LOOP_ON_GPU),
    Peer("numpy.linalg.svd, U Vᵀ", "polar", _numpy_svd, "numpy", devices=("cpu",)),
    Peer("scipy.linalg.polar loop", "polar", _scipy_polar, "scipy", devices=("cpu",), few=SLOW),
    Peer(
        "torch.optim.Muon's iteration",
        "polar",
        _muon,
        stated={RESIDUAL: 0.7, POLAR: 0.2},
        note="5 steps in bfloat16, kappa about 1.5 left",
        few=HALF_PRECISION,
    ),
    Peer(
        "gram-newton-schulz",
        "polar",
        _gram_newton_schulz,
        "gram_newton_schulz",
        {RESIDUAL: 0.5, POLAR: 0.1},
        "an optimizer's accuracy; half precision",
        few=HALF_PRECISION,
    ),
    Peer(
        "emerging-optimizers newton_schulz",
        "polar",
        _emerging_optimizers,
        "emerging_optimizers",
        {RESIDUAL: 0.7, POLAR: 0.2},
        "5 quintic steps",
        few=HALF_PRECISION,
    ),
    Peer("orthogonal_ loop, no sampling", "qr", _each(signed_qr), few=LOOP_ON_GPU),
    Peer("linalg.qr, one batch", "qr", lambda w: lambda: signed_qr(w), few=LOOP_ON_GPU),
    Peer("numpy.linalg.qr, one batch", "qr", _numpy_qr, "numpy", devices=("cpu",)),
    Peer("scipy.linalg.qr loop", "qr", _scipy_qr, "scipy", devices=("cpu",), few=SLOW),
    Peer("orthogonal_ loop", "random", orthogonal_loop, few=LOOP_ON_GPU),
    Peer("orthogonal_ on the whole", "random", _orthogonal_whole, few={"cuda": 1e10}),
    Peer(
        "randn + linalg.svd, U Vᵀ (Algorithm 1)",
        "random",
        lambda like: lambda: svd_polar(torch.randn_like(like)),
        few=LOOP_ON_GPU,
    ),
    Peer("geotorch Stiefel.sample", "random", _geotorch, "geotorch", few={"cpu": 5e6, "cuda": 1e8}),
    Peer("torch.randn", "samples", lambda like: lambda: torch.randn_like(like), halves=True),
    Peer("numpy Philox standard_normal", "samples", _numpy_normal, "numpy", devices=("cpu",)),
    Peer("linalg.cond", "kappa", lambda w: lambda: torch.linalg.cond(w), few=LOOP_ON_GPU),
    Peer("linalg.svdvals", "kappa", lambda w: lambda: _ratio(torch.linalg.svdvals(w)), few=LOOP_ON_GPU),
    Peer("Gram + linalg.eigvalsh", "kappa", lambda w: lambda: _gram_eigenvalues(w), note="no error bar"),
    Peer("numpy.linalg.cond", "kappa", _numpy_cond, "numpy", devices=("cpu",)),
    Peer("scipy.linalg.svdvals loop", "kappa", _scipy_svdvals, "scipy", devices=("cpu",), few=SLOW),
    Peer("skerch ssvd, all columns", "kappa", _skerch, "skerch", few=SLOW),
    Peer("cola-ml Lanczos", "kappa", _cola, "cola", few={"cpu": 1e7, "cuda": 1e7}),
    Peer(
        "spectral_norm, 1 warm iteration",
        "top",
        _spectral_norm,
        stated={TOP: 5e-2},
        note="sigma_max alone, no error bar",
        few=SLOW,
    ),
)


def of(*jobs: str) -> tuple[Peer, ...]:
    """The rows that do one of ``jobs``."""
    return tuple(peer for peer in PEERS if peer.job in jobs)


def weightwatcher(folder: Path) -> Contestant | Skipped:
    """weightwatcher's analysis of the attention layers of a transformers folder."""
    name = "weightwatcher analyze"
    if why := missing("weightwatcher"):
        return Skipped(name, why)
    import logging

    from transformers import AutoModel
    from weightwatcher import WeightWatcher

    logging.getLogger("weightwatcher").setLevel(logging.ERROR)
    watcher = WeightWatcher(model=AutoModel.from_pretrained(folder))
    described = watcher.describe()
    layers = [int(row.layer_id) for row in described.itertuples() if row.name in ("query", "key", "value")]
    tops = {
        row.layer_id: float(torch.linalg.matrix_norm(dict(watcher.model.named_modules())[row.longname].weight, 2))
        for row in described.itertuples()
        if row.layer_id in layers
    }

    def error(details: Any) -> Errors:
        return {TOP: max(abs(row.sv_max / tops[row.layer_id] - 1) for row in details.itertuples())}

    return Contestant(
        name,
        lambda: watcher.analyze(layers=layers, randomize=False, plot=False),
        error,
        {TOP: 1e-3},
        "whole layers, no heads; fits power laws to their spectra",
    )

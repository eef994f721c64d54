"""Does a model still hold what a conditioned initialization gave it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from . import _validate
from .heads.discover import Where
from .heads.layout import LATENT, LayoutFunction
from .initialize.init_report import InitReport, ProjectionReport
from .initialize.measure import measure_all, sigma_tolerance
from .initialize.scope import Scope, locate, weights_of
from .initialize.target import resolve


@dataclass(frozen=True)
class VerifyReport:
    """Outcome of :func:`verify`.

    Attributes
    ----------
    measured : every projection looked at, as it is now.
    failures : one sentence per projection that does not hold, naming the parameter, its role and its worst head.
    unknown : (name, reason) of modules that look like attention but have no layout.
    """

    measured: tuple[ProjectionReport, ...]
    failures: tuple[str, ...]
    unknown: tuple[tuple[str, str], ...]

    @property
    def ok(self) -> bool:
        """True if every projection holds."""
        return not self.failures

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        held = f"{len(self.measured) - len(self.failures)} of {len(self.measured)} projections hold"
        return "\n".join((held, *self.failures, *(f"unknown {name}: {reason}" for name, reason in self.unknown)))


def verify(
    model: nn.Module,
    report: InitReport | None = None,
    *,
    gain: float | str = "unit",
    roles: str = "qkv",
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
) -> VerifyReport:
    """Check that every head's singular values all equal its gain.

    The gain is checked and not only kappa, since a shard or a copy with kappa 1 can have the wrong scale. The
    model is only read.

    Parameters
    ----------
    model : as for :func:`conditioned_`.
    report : what :func:`conditioned_` returned; its projections are checked, each against its own gain.
    gain : without a report, the gain expected everywhere: "unit" for 1, a number, or "any" for kappa = 1 at
        whatever scale each head has.
    roles : without a report, the roles to check, e.g. "qk" after ``value="keep"``.
    where, layouts, strict : as for :func:`conditioned_`.

    Returns
    -------
    VerifyReport, true if everything holds within 1e-5 (float32), 1e-11 (float64) or eps of a half type; with a report
    within the looser of that of the dtype now and that of the dtype then.

    Raises
    ------
    NoAttentionFound, LayoutError, TypeError, ValueError
        as :func:`conditioned_`; ValueError if the report is of another model.
    """
    _check_gain(gain)
    if report is not None and report.deferred:
        raise ValueError(
            "report is of an initialization that was deferred on the meta device, which has touched nothing yet; "
            "verify what materialize_ returns"
        )
    wanted = {(entry.parameter, entry.label): entry for entry in report.touched} if report else None
    with weights_of(model):
        found = locate(model, Scope(where, layouts, strict))
        found_targets = resolve(found, outputs=wanted is not None)
        targets = [target for target in found_targets if wanted is None or target.key in wanted]
        for target in targets:
            _validate.floating(target.weight, target.name)
            _validate.not_meta(target.weight, target.name)
        if missing := set(wanted or ()) - {target.key for target in targets}:
            raise ValueError(
                f"report is of another model: it has {', '.join(name for name, _ in sorted(missing))}, this one does "
                "not"
            )
        gains = [math.nan if wanted is None else wanted[target.key].gain for target in targets]
        measured = measure_all(targets, gains)
    if wanted is not None:
        # Weights made in a half type and cast up since hold what that type could.
        return VerifyReport(
            tuple(measured),
            _failures(measured, [wanted[target.key].dtype for target in targets]),
            found.unknown,
        )
    return judge(measured, gain=gain, roles=roles, unknown=found.unknown)


def judge(
    measured: Sequence[ProjectionReport],
    *,
    gain: float | str = "unit",
    roles: str = "qkv",
    unknown: tuple[tuple[str, str], ...] = (),
) -> VerifyReport:
    """:func:`verify` on projections measured before, in a model or a file."""
    expected = {"unit": 1.0, "any": math.nan}[gain] if isinstance(gain, str) else gain
    # A latent factor has gain 1 whatever its role's (see conditioned_), and a shared one both of its roles.
    kept = [
        replace(entry, gain=1.0 if entry.part == LATENT and gain != "any" else expected)
        for entry in measured
        if set(entry.role) <= set(roles)
    ]
    return VerifyReport(tuple(kept), _failures(kept), unknown)


def _failures(entries: Sequence[ProjectionReport], made: Sequence[torch.dtype] | None = None) -> tuple[str, ...]:
    """One sentence per entry that does not hold; ``made`` says in which dtype each was initialized, if not its own."""
    dtypes = [entry.dtype for entry in entries] if made is None else made
    return tuple(sentence for entry, dtype in zip(entries, dtypes, strict=True) if (sentence := _failure(entry, dtype)))


def _check_gain(gain: float | str) -> None:
    if isinstance(gain, str):
        _validate.choice(gain, "gain", ("unit", "any"))
    else:
        _validate.positive(gain, "gain")


def _failure(entry: ProjectionReport, made: torch.dtype) -> str:
    estimate, tolerance = entry.estimate, max(sigma_tolerance(entry.dtype), sigma_tolerance(made))
    gain = estimate.sigma_max if math.isnan(entry.gain) else entry.gain
    # The far ends of the brackets, so that what passes is proven and not only estimated.
    ends = (estimate.sigma_max_high / gain - 1, 1 - estimate.sigma_min_low / gain)
    if not entry.measured:
        return ""
    off = torch.maximum(*ends).nan_to_num(math.inf)
    head = int(off.argmax())
    if float(off[head]) <= tolerance:
        return ""
    return (
        f"{entry.parameter} ({entry.label}): head {head} has sigma_max {float(estimate.sigma_max[head]):.6g}, "
        f"sigma_min {float(estimate.sigma_min[head]):.6g}, kappa {float(estimate.kappa[head]):.6g}, expected "
        f"{'equal singular values' if math.isnan(entry.gain) else f'{entry.gain:.6g}'} to {tolerance:.1g}"
    )

"""Every initialization by its name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from ..heads.discover import Where
from ..heads.layout import LayoutFunction
from .apply import Draw, Scheme
from .conditioned import conditioned_
from .init_report import InitReport
from .mimetic import mimetic_
from .random import KINDS, random_
from .scope import Scope
from .spectral_conditioning import spectral_conditioning
from .weight_selection import weight_selection_


def default_(
    model: nn.Module,
    *,
    seed: int = 0,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
    include_frozen: bool = False,
    overwrite: bool = False,
) -> InitReport:
    """Leave every weight as the model's own initialization made it: the control of a comparison.

    The model is checked as the other schemes check it, and the report lists every projection as skipped.
    """
    scheme = Scheme("default", seed, lambda _: Draw(None, "as the model's own initialization made it"))
    return scheme.apply(model, Scope(where, layouts, strict, include_frozen, overwrite))


SCHEMES: dict[str, Callable[..., InitReport]] = {
    "default": default_,
    "conditioned": conditioned_,
    "mimetic": mimetic_,
    "weight_selection": weight_selection_,
    "spectral_conditioning": spectral_conditioning,
    "random": random_,
    **{kind: partial(random_, kind=kind) for kind in KINDS},
}
"""Name to function. All take the model first, the rest by keyword, and fail without a trace."""


def initialize_(model: nn.Module, scheme: str = "conditioned", **options: Any) -> InitReport:
    """Initialize ``model`` in place by the scheme of that name.

    Parameters
    ----------
    model : as for :func:`conditioned_`.
    scheme : "conditioned", "mimetic", "weight_selection", "spectral_conditioning", "random" or directly one of its
        kinds ("trunc_normal", "xavier", "kaiming", "orthogonal"), or "default", which leaves the weights as they are.
    options : keyword arguments of the scheme's function, e.g. ``gain`` and ``value`` of "conditioned", ``qk`` and
        ``vo`` of "mimetic", ``teacher`` of "weight_selection", and of nearly all ``seed``, ``where``, ``layouts``,
        ``strict``, ``include_frozen``, ``overwrite``.

    Returns
    -------
    InitReport, the same type for all of them.

    Raises
    ------
    ValueError, TypeError
        for an unknown scheme or option, with those that exist; for a missing one; and what the scheme's function
        raises. The model is then bit-identical.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"scheme must be one of {', '.join(map(repr, SCHEMES))}, got {scheme!r}")
    known = options_of(scheme)
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(
            f"scheme {scheme!r} has no option {', '.join(map(repr, unknown))}; it has {', '.join(map(repr, known))}"
        )
    if missing := sorted(_needed(scheme) - set(options)):
        raise TypeError(f"scheme {scheme!r} needs the option {', '.join(map(repr, missing))}")
    return SCHEMES[scheme](model, **options)


def _needed(scheme: str) -> set[str]:
    parameters = inspect.signature(SCHEMES[scheme]).parameters.values()
    return {each.name for each in parameters if each.default is each.empty and each.name != "model"}


def options_of(scheme: str) -> tuple[str, ...]:
    """Names of the arguments that a scheme takes beside the model."""
    function = SCHEMES[scheme]
    fixed = function.keywords if isinstance(function, partial) else {}
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if name != "model" and name not in fixed
    )

"""Spectral conditioning (Saratchandran and Lucey, NeurIPS 2025): a fixed lambda I is added to W_Q, W_K and W_V."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import _validate, distributed
from ..heads.discover import Discovery, Where
from ..heads.layout import LayoutFunction, View
from .conditioned import identity_heads
from .init_report import InitReport
from .measure import measure
from .scope import Scope, weights_of
from .target import Target, resolve
from .writing import writable

FORMS = ("block", "repeat")


class AddIdentity(nn.Module):
    """W + lambda I on the heads of one stored weight: a parametrization, with no parameter of its own.

    ``views`` are those of the heads, and ``block`` says which identity: see :func:`spectral_conditioning`.
    """

    def __init__(self, views: tuple[View, ...], size: float, *, block: bool) -> None:
        super().__init__()
        self.views, self.size, self.block = views, size, block

    def forward(self, weight: Tensor) -> Tensor:
        total = weight.clone()
        for view in self.views:
            heads = view(total)
            heads.add_(identity_heads(heads, self.size, block=self.block))
        return total

    def extra_repr(self) -> str:
        return f"lambda={self.size:g}, {'block' if self.block else 'repeat'}, {len(self.views)} roles"


def spectral_conditioning(
    model: nn.Module,
    *,
    lam: float = 10.0,
    roles: str = "qkv",
    form: str = "block",
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    strict: bool = True,
    include_frozen: bool = False,
    overwrite: bool = False,
) -> InitReport:
    """Attach to ``model`` a fixed lambda I, added to W_Q, W_K and W_V of every head in every forward.

    The forward uses W + lambda I, and training updates W alone (Saratchandran and Lucey, "Spectral Conditioning of
    Attention Improves Transformer Performance", NeurIPS 2025). By Weyl's inequality sigma_min(W + lambda I) is at least
    lambda - ||W||, and sigma_max at most lambda + ||W||, so that kappa is at most (lambda + ||W||) / (lambda - ||W||)
    while lambda exceeds ||W||.

    Parameters
    ----------
    model : as for :func:`conditioned_`; weights that are parametrized already are refused.
    lam : lambda; 10 in the paper.
    roles : which of "q", "k", "v".
    form : the rectangular identity. "block": that of the whole stacked weight, row i at column i mod in_features;
        "repeat": the same I for every head, as W_Q + lambda I reads for one head's D x d matrix.
    where, layouts, strict, include_frozen, overwrite : as for :func:`conditioned_`. ``overwrite`` is asked for loaded
        weights since a trained model computes something else with lambda I attached.

    Returns
    -------
    InitReport of W + lambda I, per head; the stored weights have not changed.

    Raises
    ------
    NoAttentionFound, LayoutError, TypeError, ValueError
        as :func:`conditioned_`, also for a weight that two modules share; then nothing is attached.

    Notes
    -----
    A ``torch.nn.utils.parametrize`` parametrization: the stored weight is the same Parameter under the name
    ``...parametrizations.weight.original``, in ``state_dict`` too, so attach before building an optimizer by name or
    loading a checkpoint saved while attached. :func:`remove_spectral_conditioning` takes it off,
    :func:`export_spectral_conditioning` gives plain weights. In half types lambda + w is rounded: steps of 0.06 at 10
    in bfloat16 on the identity's own elements; keep the stored weights in float32. *Cost.* one copy of each weight per
    forward.
    """
    _validate.positive(lam, "lam")
    _validate.choice(form, "form", FORMS)
    if not roles or set(roles) - set("qkv"):
        raise ValueError(f"roles must be some of 'q', 'k' and 'v' in one string, got {roles!r}")

    def choose(_: nn.Module, found: Discovery) -> list[Target]:
        return [target for target in resolve(found) if set(target.projection.role) & set(roles)]

    with weights_of(model):
        found, targets = writable(model, Scope(where, layouts, strict, include_frozen, overwrite), choose)
        groups: dict[tuple[nn.Module, str], list[Target]] = {}
        for target in targets:
            groups.setdefault((target.owner, target.attribute), []).append(target)
        _check_free(groups)
        attached: list[tuple[nn.Module, str]] = []
        try:
            for (owner, attribute), group in groups.items():
                views = tuple(target.projection.view for target in group)
                parametrize.register_parametrization(owner, attribute, AddIdentity(views, lam, block=form == "block"))
                attached.append((owner, attribute))
            made = f"+ {lam:g} I in the forward, {form}"
            touched = tuple(measure(target, target.heads, made=made, gain=math.nan) for target in targets)
        except BaseException:
            for owner, attribute in attached:
                _remove(owner, attribute, bake=False)
            raise
    return InitReport("spectral conditioning", 0, touched, found.skipped, found.unknown)


def remove_spectral_conditioning(model: nn.Module, *, bake: bool = False) -> int:
    """Take every lambda I off ``model``; the number of weights that had one.

    Each weight is the Parameter it was, under its own name, with the values that training gave it, bit for bit; with
    ``bake``, with lambda I added for good, so that the model computes what it did.
    """
    places = _attached(model)
    for module, attribute in places:
        _remove(module, attribute, bake=bake)
    return len(places)


def export_spectral_conditioning(model: nn.Module) -> dict[str, Tensor]:
    """``model.state_dict()`` with plain names, W + lambda I under each weight's own; ``model`` stays as it is."""
    exported = model.state_dict()
    places = set(_attached(model))
    with torch.no_grad():
        for path, module in model.named_modules(remove_duplicate=False):
            for attribute in module._modules.get("parametrizations", nn.Module())._modules:
                if (module, attribute) in places:
                    begin = f"{path}." if path else ""
                    del exported[f"{begin}parametrizations.{attribute}.original"]
                    exported[f"{begin}{attribute}"] = getattr(module, attribute).detach()
    return exported


def _remove(module: nn.Module, attribute: str, *, bake: bool) -> None:
    # torch keeps the property on a class made for the module and deletes it there; deep copies share that class.
    made = type(module)
    body = {name: value for name, value in vars(made).items() if name not in ("__dict__", "__weakref__")}
    module.__class__ = type(made.__name__, made.__bases__, body)
    parametrize.remove_parametrizations(module, attribute, leave_parametrized=bake)


def _attached(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where :func:`spectral_conditioning` put something."""
    return [
        (module, attribute)
        for module in model.modules()
        if parametrize.is_parametrized(module)
        for attribute, steps in module.get_submodule("parametrizations").named_children()
        if isinstance(steps, parametrize.ParametrizationList) and any(isinstance(step, AddIdentity) for step in steps)
    ]


def _check_free(groups: Mapping[tuple[nn.Module, str], list[Target]]) -> None:
    """Refuse weights that another parametrization makes, that two modules share, or that are not here as a whole."""
    seen: dict[int, str] = {}
    for group in groups.values():
        target = group[0]
        if distributed.is_sharded(target.weight) or target.piece is not None:
            raise ValueError(f"{target.name} is sharded; attach lambda I first, and shard the model then")
        _validate.not_meta(target.weight, target.name)
        if target.parametrized:
            raise ValueError(
                f"{target.name} is parametrized already; remove that first (a lambda I by remove_spectral_conditioning)"
            )
        other = seen.setdefault(id(target.weight), target.name)
        if other != target.name:
            raise ValueError(f"{target.name} is tied to {other}; untie them, or leave one layer out with where=")

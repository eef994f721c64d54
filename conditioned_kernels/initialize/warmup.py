"""Compiling ahead of use."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..heads.discover import Where
from ..heads.layout import LayoutFunction
from ..orthogonalize import warmup as warmup_heads
from .scope import Scope, locate, weights_of
from .target import resolve


def warmup(
    model: nn.Module,
    *,
    where: Where | None = None,
    layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
    method: str = "polar",
) -> int:
    """Compile the GPU kernels that this package will launch for ``model``, and write nothing.

    A kernel compiles at its first launch, which takes seconds per kind of head and can outlast the timeout of a
    process group. Triton caches on disk, so one run per machine and version is enough.

    Parameters
    ----------
    model, where, layouts : as in :func:`conditioned_`.
    method : "polar" or "qr".

    Returns
    -------
    How many kinds of heads were compiled for; 0 where no weight is served by the Triton backend.
    """
    with weights_of(model):
        targets = resolve(locate(model, Scope(where, layouts, strict=False)))
        return warmup_heads([target.heads for target in targets], method=method)

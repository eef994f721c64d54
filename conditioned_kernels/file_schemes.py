"""The initializations that can be written to files, and what each needs in memory for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from . import _validate
from .initialize import InitReport, initialize_
from .initialize.random import KINDS

Options = Mapping[str, Any]


@dataclass(frozen=True)
class FileScheme:
    """How a scheme of :func:`initialize_` is written to files.

    Attributes
    ----------
    options : names of its own options.
    outputs : whether it writes W_O beside W_Q, W_K and W_V.
    reads : whether, with these options, the result depends on the attention weights that were there.
    whole : why, with these options, it needs the whole model in memory; "" where one block at a time will do.
    """

    options: tuple[str, ...] = ()
    outputs: bool = False
    reads: Callable[[Options], bool] = lambda _: False
    whole: Callable[[Options], str] = lambda _: ""


def _preserves(options: Options) -> bool:
    gain = options.get("gain")
    return options.get("value") == "keep" or "preserve" in (gain.values() if isinstance(gain, Mapping) else (gain,))


FILE_SCHEMES: dict[str, FileScheme] = {
    "conditioned": FileScheme(("gain", "value"), reads=_preserves),
    "mimetic": FileScheme(
        ("qk", "vo", "positions"),
        outputs=True,
        reads=lambda _: True,  # what qk=None, vo=None and relative positions leave alone
        whole=lambda options: "a position table lies outside of attention" if options.get("positions") else "",
    ),
    "weight_selection": FileScheme(
        ("teacher", "like", "config", "layers", "elements", "leave"),
        whole=lambda _: "weight_selection writes every parameter of a new model",
    ),
    **{kind: FileScheme(("std",) if kind == "trunc_normal" else ()) for kind in KINDS},
    "default": FileScheme(reads=lambda _: True),
}
"""By name. Spectral conditioning is not among them, since it changes the forward and no stored weight."""


@dataclass(frozen=True)
class InitOptions:
    """What to do to a model: a scheme of :data:`FILE_SCHEMES`, the seed, and the scheme's own options."""

    seed: int = 0
    scheme: str = "conditioned"
    options: Options = field(default_factory=dict)

    def __post_init__(self) -> None:
        _validate.choice(self.scheme, "scheme", tuple(FILE_SCHEMES))

    def apply(self, model: nn.Module, **more: Any) -> InitReport:
        """The scheme with these options, leaving unknown attention alone (the report lists it)."""
        return initialize_(model, self.scheme, seed=self.seed, strict=False, **self.options, **more)

    @property
    def outputs(self) -> bool:
        """Whether W_O is written too."""
        return FILE_SCHEMES[self.scheme].outputs

    @property
    def reads_weights(self) -> bool:
        """Whether the result depends on the attention weights that were there."""
        return FILE_SCHEMES[self.scheme].reads(self.options)

    @property
    def whole(self) -> str:
        """Why the whole model has to be in memory; "" where one block at a time will do."""
        return FILE_SCHEMES[self.scheme].whole(self.options)

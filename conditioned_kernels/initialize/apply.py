"""The one path every scheme takes: find the heads, check, compute everything, measure it, then write.

Nothing is written before everything is computed, and a write that fails is undone, so a failing call
leaves the model bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import distributed
from ..heads.discover import Discovery, Where
from . import materialize
from .init_report import InitReport
from .measure import joined_chunks, measure
from .scope import Scope, weights_of
from .target import WHOLE, Target
from .writing import Choice, projections, untie, writable, writing


@dataclass(frozen=True)
class Draw:
    """What a scheme makes of one target.

    Attributes
    ----------
    heads : new values of the heads ``target.chunk``, shape ``target.drawn_shape``, in any floating dtype; or of all
        heads, of which the chunk is kept; None leaves the projection alone. The values of a head must not depend on the
        chunk it is drawn in.
    made : in words, what they are, or why the projection was left alone.
    gain : the singular value asked for; NaN if the scheme has none.
    """

    heads: Tensor | None
    made: str
    gain: float = math.nan


@dataclass(frozen=True)
class Scheme:
    """An initialization, whatever the model.

    Attributes
    ----------
    name : in reports.
    seed : of its sample stream.
    draw : what it makes of one target.
    prepare : sees all checked targets first, for what is faster done together.
    choose : picks the targets of a scheme that writes more than Q, K and V.
    source : what is open from ``choose`` to the last ``draw``.
    whole : it writes beside the attention layers too, so it cannot be run on one layer after the other.
    """

    name: str
    seed: int
    draw: Callable[[Target], Draw]
    prepare: Callable[[list[Target]], None] = lambda _: None
    choose: Choice = projections
    source: Callable[[], AbstractContextManager[object]] = nullcontext
    whole: bool = False

    def apply(self, model: nn.Module, scope: Scope) -> InitReport:
        """Draw every projection of ``model`` in ``scope``, and write the results."""
        with weights_of(model), self.source():
            found, targets = writable(model, scope, self.choose)
            if waiting := [target for target in targets if distributed.is_meta(target.weight)]:
                return self._defer(model, scope, found, waiting)
            targets, tied = untie(model, found, targets)
            self.prepare(targets)
            skipped, writes, touched, others = [*found.skipped, *tied], [], [], []
            for target in targets:
                drawn, blocks, estimates = Draw(None, ""), [], []
                for chunk in target.piece.chunks() if target.piece else (range(target.count),):
                    drawn, heads = self._draw(target.part(chunk))
                    if drawn.heads is None:
                        break
                    blocks.append((chunk, target.piece.select(heads, chunk) if target.piece else heads))
                    if target.projection.role != WHOLE:
                        estimates.append(measure(target, heads, made=drawn.made, gain=drawn.gain, local=chunk))
                if drawn.heads is None:
                    skipped.append((f"{target.name} ({target.projection.role})", drawn.made))
                    continue
                writes.append((target, blocks))
                if estimates:
                    touched.append(joined_chunks(estimates))
                else:
                    others.append(target.name)
            with writing(self.name) as write:
                while writes:  # each is let go once it is written
                    write(*writes.pop(0))
        materialize.forget(model)  # what was called before it had values has been called again
        return InitReport(self.name, self.seed, tuple(touched), tuple(skipped), found.unknown, tuple(others))

    def _draw(self, target: Target) -> tuple[Draw, Tensor]:
        """What is drawn for the target's chunk, (len(chunk), head_dim, in_features) in the weight's dtype."""
        drawn = self.draw(target)
        if drawn.heads is None:
            return drawn, torch.empty(0)
        heads = drawn.heads.reshape(-1, *target.shape[-2:])
        if len(heads) != len(target.chunk):
            heads = heads[target.chunk.start : target.chunk.stop]
        return drawn, heads.to(target.dtype)

    def _defer(self, model: nn.Module, scope: Scope, found: Discovery, waiting: list[Target]) -> InitReport:
        """Note the scheme on a model without values; see ``materialize_``."""
        layers = tuple(layer.name for layer in found.layers)

        def run(model: nn.Module, where: Where | None) -> InitReport:
            return self.apply(model, scope if where is None else replace(scope, where=where))

        note = materialize.Deferred(layers, found.skipped, run, self.whole)
        materialize.defer(model, note)
        deferred = tuple(
            (f"{target.name} ({target.stream_role})", "is on the meta device; materialize_ initializes it")
            for target in waiting
        )
        return InitReport(self.name, self.seed, (), found.skipped, found.unknown, deferred=deferred)


@contextmanager
def named_errors(target: Target) -> Iterator[None]:
    """Prefix the parameter's name to errors of the numerical functions."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"{target.name} ({target.projection.role}): {error}") from error

"""Watch condition numbers while a model trains."""

from __future__ import annotations

import os
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .. import _validate, distributed
from .._backend import BACKENDS
from ..heads.discover import NoAttentionFound, Where, find_attention
from ..heads.layout import LATENT, LayoutFunction
from ..initialize.target import Target, resolve
from .activations import Capture, Sampling, compiled_around, uncast
from .alerts import Alert
from .records import JACOBIAN, Record, Sink
from .ring import Ring
from .weights import Group, Unreadable, Watched, groups, spectrum_records, watch

METHODS = ("auto", "exact", "lanczos")


class ConditioningMonitor:
    """kappa of every head's W_Q, W_K and W_V at every step, and of its attention Jacobian now and then.

    Call :meth:`step` once after each optimizer step. On ordinary steps nothing waits for the device: each head's
    extreme singular values come from its Gram matrix G = W W^T with a certified bracket, from the vectors of the step
    before, into a buffer on the device. :meth:`flush` reads the buffer in one transfer.

    Parameters
    ----------
    model : any model that :func:`find_attention` knows; wrappers are looked through. It is only read.
    every : measure the weights at every so many steps.
    activations_every : measure the attention Jacobians at every so many steps, the first included; 0 for never. Forward
        hooks exist on such steps only, and only until their layer has been called once.
    layers_per_step : measure so many layers at a time, in turn; None for all.
    heads : indices of the heads to measure; a projection with fewer heads has those it has. None for all.
    samples, tokens : of a real batch, how many sequences and how many tokens of each the Jacobians are of.
    where, layouts : as for :func:`conditioned_`.
    strict : refuse a model with nothing to measure; False lets the monitor idle, as a pipeline stage without attention
        needs.
    rtol : wanted ``high / low - 1`` of the weights' kappa. Projections with a head that needs float64 for it get it,
        as decided from the figures of the last flush.
    backend : "auto", "torch", "triton" or "extension"; see :func:`explain_backend`.
    jacobian : method of ``jacobian_condition``: "auto", "exact" or "lanczos".
    spectra : store every singular value of so many heads per projection, at the start and at the end.
    first_step : number of optimizer steps the model has had, where a run is continued.
    flush_every : measured steps after which :meth:`step` flushes by itself.
    capacity : newest records kept in :attr:`records`; sinks get all of them.
    sinks : objects with ``write(records)`` and ``close()``; see ``conditioned_kernels.integrations``. One that raises
        is dropped with a warning, and training goes on.
    alerts : :class:`~conditioned_kernels.monitor.KappaAbove` and its kin, looked at in every flush.

    Attributes
    ----------
    records : deque of the newest :class:`~conditioned_kernels.monitor.Record`, flushed ones only.
    skipped : reasons by name, of attention layers and projections that are not measured.
    silent : layers whose forward hook did not fire when it should have, with the step.

    Raises
    ------
    NoAttentionFound
        where there is nothing to measure.
    RuntimeError
        for ``activations_every`` on a compiled model: torch.compile ignores hooks that come and go.

    Notes
    -----
    *Accuracy.* Brackets contain the exact kappa of the stored weights. ``kappa`` is good to ``rtol`` down to
    sigma_min / sigma_max = 1e-5; beyond 1e7 it is inf. A head whose kappa leaves what float32 can bracket has a wide
    bracket until the next flush, and says so in its status.
    *Cost.* Per head of n x m, n <= m: one read and n^2 m flops, doubled in float64, plus about 2 n^3. A Jacobian costs
    what :func:`jacobian_condition` says, about the cube of ``tokens`` times the head's width on steps that have them;
    ``tokens``, ``heads`` and ``layers_per_step`` bound it.
    *Sharded models.* Weights that are DTensors give the same figures on every rank, from Gram matrices summed over the
    ranks; no weight is gathered. Measuring is then a collective: every rank of a mesh has a monitor with the same
    arguments and calls ``step`` at the same steps. Attention Jacobians need no collective: under FSDP2 a layer's
    weights are whole inside its forward, in the dtype of its mixed precision policy, and each rank's figures are of its
    own batch. Where weights stay DTensors in the forward, as under tensor parallelism, a record says so by name.
    *Synchronization.* None on ordinary steps with the extension. Without it, torch.linalg.eigvalsh on a GPU waits once
    per group of heads. Construction, flushes and steps with activations read the device.
    *Effect on training.* None: weights, losses and random state are bit for bit those of a run without it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        activations_every: int = 0,
        layers_per_step: int | None = None,
        heads: Sequence[int] | None = None,
        samples: int = 1,
        tokens: int = 16,
        where: Where | None = None,
        layouts: Mapping[type[nn.Module], LayoutFunction] | None = None,
        strict: bool = True,
        rtol: float = 1e-2,
        backend: str = "auto",
        jacobian: str = "auto",
        spectra: int = 1,
        first_step: int = 0,
        flush_every: int = 50,
        capacity: int = 100_000,
        sinks: Sequence[Sink] = (),
        alerts: Sequence[Alert] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        self._model = model
        self._every = _validate.count(every, "every")
        self._activations_every = _validate.count(activations_every, "activations_every", least=0)
        self._layers_per_step = None if layers_per_step is None else _validate.count(layers_per_step, "layers_per_step")
        self._heads = None if heads is None else _indices(heads)
        samples, tokens = _validate.count(samples, "samples"), _validate.count(tokens, "tokens")
        self._sampling = Sampling(samples, tokens, self._heads, _validate.choice(jacobian, "jacobian", METHODS))
        self._where, self._layouts, self._strict = where, layouts, strict
        self._rtol = _validate.positive(rtol, "rtol")
        self._backend = _validate.choice(backend, "backend", BACKENDS)
        self._spectra = _validate.count(spectra, "spectra", least=0)
        self._flush_every = _validate.count(flush_every, "flush_every")
        self._schedule = f"every={every}, layers_per_step={layers_per_step}, heads={self._heads}, spectra={spectra}"
        self._sinks = _objects(sinks, "sinks", "write", "close")
        self._alerts = _objects(alerts, "alerts", "check")
        self._step = _validate.count(first_step, "first_step", least=0)
        self.records: deque[Record] = deque(maxlen=_validate.count(capacity, "capacity"))
        self.skipped: dict[str, str] = {}
        self.silent: dict[str, int] = {}
        self._captures: list[Capture] = []
        self._ready: list[Record] = []
        self._watched: list[Watched] = []
        self._turn = self._measured = 0
        self._closed = False
        self._ring = Ring()
        self._resolve()
        self._refuse()
        self._start()
        self._close_at_exit()

    # ---- what the user calls ------------------------------------------------------------------------------------

    @property
    def current_step(self) -> int:
        """Optimizer steps counted so far."""
        return self._step

    def step(self, number: int | None = None) -> None:
        """Measure what is due after an optimizer step.

        Parameters
        ----------
        number : optimizer steps taken so far; None for one more than at the last call.
        """
        if self._closed:
            raise RuntimeError("step was called on a closed ConditioningMonitor; create a new one with first_step=")
        before = self._step
        self._step = before + 1 if number is None else _validate.count(number, "number", least=0)
        if self._captures:
            self._finish(before)
        if self._step // self._every > before // self._every:
            self._measure()
        if (often := self._activations_every) and self._step // often > before // often:
            self._arm()
        if self._measured >= self._flush_every:
            self.flush()

    def flush(self) -> list[Record]:
        """Read the device, hand new records to sinks and alerts, and return them, oldest first."""
        new = self._ready
        self._ready, self._measured = [], 0
        wide: dict[int, bool] = {}
        for step, group, raw in self._ring.drain():
            new += group.figures(raw, step)
            wide |= {id(each): want for each, want in zip(group.members, group.wants_wide(raw), strict=True)}
        new.sort(key=lambda record: record.step)
        if not self._closed:
            self._revise(wide)
        self.records.extend(new)
        if new:
            for sink in list(self._sinks):
                self._guard(sink, lambda sink=sink: sink.write(new))  # type: ignore[misc]
            for alert in self._alerts:
                alert.check(new)
        return new

    def close(self, *, failed: bool = False) -> None:
        """Remove the hooks, store the final spectra, flush, and close the sinks. Safe to call twice.

        A monitor that is still open when the program ends is closed then, so that what a failed run saw is kept.

        Parameters
        ----------
        failed : training has ended with an error, which has to be what is raised: faults of closing are warnings, and
            nothing waits for other ranks, so sharded weights have no final spectra.
        """
        if self._closed:
            return
        self._closed = True
        self._disarm()
        try:
            self._store_spectra([each for each in self._watched if not (failed and each.piece)])
            self.flush()
        except Exception as error:
            if not failed:
                raise
            warnings.warn(f"closing the ConditioningMonitor failed: {type(error).__name__}: {error}", stacklevel=2)
        finally:
            for sink in list(self._sinks):
                self._guard(sink, sink.close)

    def __enter__(self) -> ConditioningMonitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(failed=error is not None)

    def _close_at_exit(self) -> None:
        def close(monitor: Callable[[], ConditioningMonitor | None], process: int) -> None:
            # None where it was deleted before; another number in a fork, whose parent has the same monitor.
            if (alive := monitor()) is not None and os.getpid() == process:
                alive.close(failed=True)

        weakref.finalize(self, close, weakref.ref(self), os.getpid())

    # ---- weights ------------------------------------------------------------------------------------------------

    def _resolve(self) -> None:
        """Find the heads; again where the model's modules or its weights' shapes have changed."""
        distributed.reshard(self._model)
        found = find_attention(self._model, where=self._where, layouts=self._layouts, lenient=True)
        self.skipped = dict(found.skipped) | dict(found.unknown)
        self._layers = found.layers
        self._modules = [layer.module for layer in found.layers]
        watched = []
        with _aside():
            for target in resolve(found):
                try:
                    watched.append(watch(target, self._heads))
                except Unreadable as why:
                    self.skipped[_name(target)] = str(why)
        shards = [(f"{_name(each.target)}, {self._schedule}", each.target.weight) for each in watched if each.piece]
        if shards:
            distributed.check_agreement(shards)
        if self._watched and not watched:
            warnings.warn(f"step {self._step}: {self._nothing()}; the monitor waits", stacklevel=5)
        self._watched = watched
        self._queries = {
            each.target.layer.name: each.kind[0][0]
            for each in watched
            if each.target.projection.role == "q" and each.target.projection.part != LATENT
        }
        self._plan()

    def _refuse(self) -> None:
        """Say at once what can never work. Later changes of the model are no reason to end a training run."""
        if not self._watched and self._strict:
            raise NoAttentionFound(
                f"{self._nothing()}. Tell where its heads are with layouts={{Class: function}} or register_layout"
            )
        if self._activations_every and (name := compiled_around(self._model, self._layers)):
            raise RuntimeError(
                f"activations_every={self._activations_every} needs forward hooks, and torch.compile ignores hooks "
                f"that come after it, inside {name}; compile modules other than attention layers, or pass "
                "activations_every=0: the weights' figures need no hooks"
            )

    def _nothing(self) -> str:
        reasons = "; ".join(f"{name or 'the model itself'}: {why}" for name, why in self.skipped.items())
        return f"no attention weight to measure in {type(self._model).__name__} ({reasons or 'no known class'})"

    def _plan(self) -> None:
        """Divide the layers into turns, and each turn's projections into groups."""
        names = list(dict.fromkeys(each.target.layer.name for each in self._watched))
        size = self._layers_per_step or max(len(names), 1)
        self._turns = [set(names[start : start + size]) for start in range(0, len(names), size)]
        self._groups = [
            groups((each for each in self._watched if each.target.layer.name in turn), self._rtol, self._backend)
            for turn in self._turns
        ]
        rows: dict[torch.device, int] = {}
        for turn in self._groups:
            here: dict[torch.device, int] = {}
            for group in turn:
                here[group.device] = here.get(group.device, 0) + group.rows
            rows = {device: max(rows.get(device, 0), here.get(device, 0)) for device in rows | here}
        self._ring.allocate({device: number * self._flush_every for device, number in rows.items()})

    def _due(self) -> list[Group]:
        return self._groups[self._turn % len(self._groups)] if self._groups else []

    def _measure(self) -> None:
        if any(group.sharded for group in self._due()):
            distributed.reshard(self._model)
        with _aside():
            try:
                done = [(group, group.measure()) for group in self._due()]
            except Unreadable:
                # The model is not what it was. Nothing of the step has been kept, and this step may read the device.
                self.flush()
                self._resolve()
                done = [(group, group.measure()) for group in self._due()]
            for group, values in done:
                self._ring.write(self._step, group, values)
        self._turn += 1
        self._measured += 1

    def _start(self) -> None:
        """Measure every head once, to know which need float64, and keep the result as that of the first step."""
        with _aside():
            every = groups(self._watched, self._rtol, self._backend)
            raw = {id(group): group.measure().cpu().numpy() for group in every}
            wide = {
                id(each): want
                for group in every
                for each, want in zip(group.members, group.wants_wide(raw[id(group)]), strict=True)
            }
            self._revise(wide)
            for group in groups(self._watched, self._rtol, self._backend):
                self._ready += group.figures(group.measure().cpu().numpy(), self._step)
        self._store_spectra(self._watched)
        if self._activations_every:
            self._arm()

    def _revise(self, wide: Mapping[int, bool]) -> None:
        """Give float64 to the projections that want it, and follow changes of the model's modules."""
        changed = False
        for each in self._watched:
            want = wide.get(id(each), each.wide) or each.kind[1] == torch.float64 or each.piece is not None
            changed |= want != each.wide
            each.wide = want
        found = find_attention(self._model, where=self._where, layouts=self._layouts, lenient=True)
        if not self._watched or [layer.module for layer in found.layers] != self._modules:
            self._resolve()
        elif changed:
            self._plan()

    def _store_spectra(self, watched: Iterable[Watched]) -> None:
        if not self._spectra:
            return
        with _aside():
            for each in watched:
                try:
                    self._ready += spectrum_records(each, self._spectra, self._step)
                except Unreadable as why:
                    self.skipped[_name(each.target)] = str(why)

    # ---- activations --------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """Set the hooks for the next forward pass, on the layers whose turn it is."""
        self._disarm()
        turn = self._turns[self._turn % len(self._turns)] if self._turns else set()
        self._captures = [
            Capture(layer, self._sampling.within(self._queries[layer.name]))
            for layer in self._layers
            if layer.name in turn & self._queries.keys()
        ]

    def _disarm(self) -> None:
        for capture in self._captures:
            capture.handle.remove()
        self._captures = []

    def _finish(self, step: int) -> None:
        captures = self._captures
        self._disarm()
        silent = [capture.layer.name for capture in captures if not capture.fired]
        with _aside():
            for capture in captures:
                if capture.fired:
                    self._ready += capture.records(step)
        if fresh := [name for name in silent if name not in self.silent]:
            why = (
                f"no forward call reached {', '.join(map(repr, fresh))} in step {step + 1}, so there is no attention "
                "Jacobian; hooks do not fire under torch.compile, in fused inference paths and where .forward() is "
                "called directly"
            )
            self.silent |= dict.fromkeys(fresh, step)
            self._ready += [Record(step, name, JACOBIAN, -1, status="no forward call seen") for name in fresh]
            warnings.warn(why, stacklevel=3)

    # ---- the rest -----------------------------------------------------------------------------------------------

    def _guard(self, sink: Sink, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # a full disk must not end a training run
            self._sinks = [each for each in self._sinks if each is not sink]
            warnings.warn(f"{type(sink).__name__} failed and is dropped: {type(error).__name__}: {error}", stacklevel=4)

    def __getstate__(self) -> dict[str, Any]:
        """Everything but hooks, sinks (two writers would share a file) and unread figures, which are flushed first."""
        if not self._closed:
            self.flush()
        state = self.__dict__ | {"_captures": [], "_sinks": [], "_watched": [], "_ring": Ring()}
        for name in ("_layers", "_modules", "_queries", "_turns", "_groups"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._resolve()
        self._close_at_exit()
        if self._activations_every and not self._closed and self._step % self._activations_every == 0:
            self._arm()


def _indices(heads: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(heads, Iterable):
        raise TypeError(f"heads must be a sequence of head indices such as (0, 4), or None for all, got {heads!r}")
    return tuple(dict.fromkeys(_validate.count(head, "heads", least=0) for head in heads))


def _objects(given: Sequence[Any], name: str, *methods: str) -> list[Any]:
    wanted = f"{name} must be a sequence of objects with {' and '.join(methods)}"
    if not isinstance(given, Iterable):
        raise TypeError(f"{wanted}, got {given!r}")
    found = list(given)
    for each in found:
        if missing := [method for method in methods if not callable(getattr(each, method, None))]:
            raise TypeError(f"{wanted}; {each!r} has no {missing[0]}")
    return found


def _name(target: Target) -> str:
    return f"{target.name} ({target.projection.label})"


@contextmanager
def _aside() -> Iterator[None]:
    """What the monitor computes: no graph, no autocast, no inference tensors."""
    with torch.inference_mode(False), torch.no_grad(), uncast():
        yield

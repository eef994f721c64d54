"""The main job on real models: condition GPT-2 small, then train a small language model with and without.

Everything shown is measured in the run. The text is the source code of Python's own standard library, which
every Python has.
"""

from __future__ import annotations

import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .architectures import build
from .heads.discover import find_attention
from .initialize import InitReport, conditioned_
from .initialize.init_report import ProjectionReport
from .initialize.measure import measure
from .initialize.target import resolve
from .orthogonalize import semi_orthogonal

CONTEXT = 128
BATCH = 12
LEARNING_RATE = 1e-3
WARMUP = 20
VALIDATE_EVERY = 25
VALIDATION_BATCHES = 8
TEXT_BYTES = 4 << 20

SCHEMES: dict[str, Callable[[nn.Module], InitReport] | None] = {
    "default": None,
    "conditioned": lambda model: conditioned_(model),
    "conditioned, W_V kept": lambda model: conditioned_(model, value="keep"),
}
"""Name to what is done to the freshly built model; "default" is the library's own initialization."""


@dataclass(frozen=True)
class Timing:
    """One way of making the same orthogonal matrices: seconds, and |Q^T Q - I| at its largest."""

    name: str
    seconds: float
    residual: float


@dataclass(frozen=True)
class Run:
    """One training run: (step, validation loss in nats per byte), from step 0 to the last."""

    scheme: str
    curve: tuple[tuple[float, float], ...]
    seconds: float

    @property
    def final(self) -> float:
        """Validation loss after the last step."""
        return self.curve[-1][1]

    def steps_to(self, loss: float) -> float | None:
        """First validated step at or below ``loss``, None if there is none."""
        return next((step for step, value in self.curve if value <= loss), None)


def measure_model(model: nn.Module) -> tuple[ProjectionReport, ...]:
    """kappa of every head of ``model`` as it is."""
    with torch.no_grad():
        return tuple(
            measure(target, target.heads, made="", gain=float("nan")) for target in resolve(find_attention(model))
        )


def condition_gpt2(seed: int) -> tuple[tuple[ProjectionReport, ...], InitReport, float]:
    """(before, after, seconds) of conditioning GPT-2 small at full size."""
    model = build("transformers:gpt2", seed=seed)
    before = measure_model(model)
    start = time.perf_counter()
    after = conditioned_(model, seed=seed)
    return before, after, time.perf_counter() - start


def time_orthogonal(heads: int = 288, rows: int = 64, cols: int = 768) -> list[Timing]:
    """The Q and K matrices of GPT-2 small made three ways, random numbers included; the best of two turns each."""

    def per_head() -> Tensor:
        out = torch.empty(heads, rows, cols)
        for head in out:
            nn.init.orthogonal_(head)
        return out

    def by_svd() -> Tensor:
        u, _, vh = torch.linalg.svd(torch.randn(heads, rows, cols), full_matrices=False)
        return u @ vh

    ways: dict[str, Callable[[], Tensor]] = {
        "conditioned_kernels.semi_orthogonal": lambda: semi_orthogonal((heads, rows, cols)),
        "torch.nn.init.orthogonal_, head by head": per_head,
        "batched SVD, Algorithm 1 as written": by_svd,
    }
    best = dict.fromkeys(ways, float("inf"))
    residual = {}
    with torch.random.fork_rng([]):
        for _ in range(2):
            for name, make in ways.items():
                start = time.perf_counter()
                matrices = make()
                best[name] = min(best[name], time.perf_counter() - start)
                gram = matrices.double() @ matrices.double().mT
                residual[name] = float((gram - torch.eye(rows, dtype=torch.float64)).abs().max())
    return [Timing(name, best[name], residual[name]) for name in ways]


def standard_library_text(limit: int = TEXT_BYTES) -> Tensor:
    """The bytes of the standard library's top-level modules, files in a fixed shuffled order, as uint8."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.is_file())
    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(0)).tolist()
    data = b"".join(files[i].read_bytes() for i in order)[:limit]
    if len(data) < 100 * CONTEXT:
        raise RuntimeError(f"expected Python sources in {folder}, got {len(data)} bytes; this Python ships none")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def language_model(seed: int) -> Any:
    """A byte-level GPT: width 128, 4 heads, 4 layers, context 128, without dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_positions=CONTEXT,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def train(scheme: str, text: Tensor, *, steps: int, seed: int, progress: Callable[[int, float], None]) -> Run:
    """Train the language model with one scheme; the same batches for every scheme of one seed.

    Parameters
    ----------
    scheme : a name in :data:`SCHEMES`.
    text : uint8 bytes; the last tenth is for validation.
    steps : AdamW steps of BATCH sequences, learning rate LEARNING_RATE after a linear warm-up, then a linear decay.
    progress : called after each step with (step, newest validation loss).
    """
    model = language_model(seed)
    change = SCHEMES[scheme]
    if change is not None:
        change(model)
    split = len(text) * 9 // 10
    batches = torch.Generator().manual_seed(seed)
    held_out = _sequences(text[split:], VALIDATION_BATCHES * BATCH, torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP, 1.0) * (1 - 0.9 * step / steps)
    )
    start = time.perf_counter()
    curve = [(0.0, _validate(model, held_out))]
    for step in range(1, steps + 1):
        ids = _sequences(text[:split], BATCH, batches)
        loss = next_byte_loss(model, ids)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % VALIDATE_EVERY == 0 or step == steps:
            curve.append((float(step), _validate(model, held_out)))
        progress(step, curve[-1][1])
    return Run(scheme, tuple(curve), time.perf_counter() - start)


def next_byte_loss(model: Any, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each byte given those before it, in nats."""
    logits = model(input_ids=ids).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def conclusion(runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """One row per run: final loss, difference to the default's, and the step that first reached the default's."""
    default = runs["default"]
    rows = []
    for run in runs.values():
        reached = run.steps_to(default.final)
        rows.append(
            {
                "initialization": run.scheme,
                "final validation loss (nats/byte)": f"{run.final:.3f}",
                "minus default's": f"{run.final - default.final:+.3f}",
                "reached default's final loss at step": f"{reached:.0f}" if reached is not None else "not reached",
                "seconds": f"{run.seconds:.0f}",
            }
        )
    return rows


def _sequences(text: Tensor, number: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT, (number,), generator=generator)
    return torch.stack([text[start : start + CONTEXT] for start in starts.tolist()]).long()


@torch.no_grad()
def _validate(model: Any, held_out: Tensor) -> float:
    losses = [float(next_byte_loss(model, ids)) for ids in held_out.split(BATCH)]
    return sum(losses) / len(losses)

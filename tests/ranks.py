"""Processes over gloo for tests, forked from a server that has torch and transformers loaded; none is left hanging."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 240
"""Seconds after which a group counts as hung."""

GROUP_TIMEOUT = 20
"""Seconds a collective waits for the others."""


def run_ranks(
    function: Callable[..., None], world: int, folder: Path, *args: object, limit: float = LIMIT
) -> list[int]:
    """Run ``function(folder, *args)`` in ``world`` processes of one group; their exit codes, -9 for one that hung.

    What a process raised is in ``folder / "error-<rank>.txt"``.
    """
    context = multiprocessing.get_context("forkserver")
    models = [f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "gpt_neox")]
    context.set_forkserver_preload(["torch.distributed.tensor", *models, function.__module__])
    folder.mkdir(parents=True, exist_ok=True)
    group = [
        context.Process(target=_rank, args=(function, rank, world, folder, *args), daemon=True) for rank in range(world)
    ]
    for process in group:
        process.start()
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=limit)
    for process in group:
        process.join(max(0.0, (deadline - datetime.datetime.now()).total_seconds()))
    for process in group:
        if process.is_alive():
            process.kill()
            process.join()
    return [process.exitcode if process.exitcode is not None else -9 for process in group]


def errors(folder: Path) -> str:
    """What the processes raised."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("error-*.txt")))


def _rank(function: Callable[..., None], rank: int, world: int, folder: Path, *args: object) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1000 + rank)  # the ranks' random states differ, and must not matter
    try:
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT),
        )
        function(folder, *args)
    except BaseException:
        (folder / f"error-{rank}.txt").write_text(f"rank {rank} of {world}:\n{traceback.format_exc()}")
        os._exit(1)  # no waiting for the others
    dist.destroy_process_group()

"""Measure what a model of billions of parameters costs: ``python -m benchmarks.sharded``.

Llama-3-8B's attention (published shape: width 4096, 32 heads of 128, 8 K/V heads, 32 layers) is streamed to disk, two
layers of the 70B's (width 8192, 64 heads, 80 layers) likewise with the whole worked out from them, and one and two
processes draw the shards of one layer. ``--full`` streams the whole 8B model, 16 GB of disk. Writes
benchmarks/results/sharded.json; the weights are deleted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RESULTS = Path(__file__).parent / "results" / "sharded.json"
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"num_hidden_layers": 32, "vocab_size": 128256}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA_70B |= {"num_hidden_layers": 80, "vocab_size": 128256}


COMMAND = """
import atexit, sys
from conditioned_kernels.bench.machine import resident
from conditioned_kernels.cli import main
atexit.register(lambda: print(resident("VmHWM")))
main()
"""
"""The command line, which says at the end what memory it took at most."""


def streamed(config: dict[str, int], folder: Path, *options: str) -> dict[str, Any]:
    """Seconds, bytes and peak memory of one ``init`` in a process of its own, beside how busy the machine was."""
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "out"
    arguments = ["init", "transformers:llama", "--config", str(folder / "config.json"), "--out", str(out)]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-c", COMMAND, *arguments, "--dtype", "bf16", *options]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    seconds, used = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    shutil.rmtree(out)
    *_, speed, _, peak = said.strip().splitlines()
    print(speed)
    return {
        "seconds": round(seconds, 2),
        "processor_seconds": round(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime, 2),
        "load_average": round(os.getloadavg()[1], 1),
        "bytes": size,
        "gigabytes_per_second": round(size / seconds / 1e9, 4),
        "peak_rss_bytes": int(peak),
        "said": speed,
    }


class Attention(nn.Module):
    """W_Q and W_K of one layer as one user class has them."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(width, rows, bias=False, device="meta") for _ in "qk")


def draw_shards(rank: int, world: int, rendezvous: str, rows: int, width: int, head: int, out: str) -> None:
    """Processor seconds of one rank's part of one layer, best of five. No rank waits for another."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import conditioned_kernels as ck

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model = Attention(rows, width)
    for layer in (model.q, model.k):
        layer.weight = nn.Parameter(distribute_tensor(torch.empty(rows, width), mesh, [Shard(0)], src_data_rank=None))
    layouts = {
        Attention: lambda module: {
            "q": module.q.weight.unflatten(0, (-1, head)),
            "k": module.k.weight.unflatten(0, (-1, head)),
        }
    }
    best = math.inf
    for _ in range(5):
        dist.barrier()
        start = time.process_time()
        ck.conditioned_(model, layouts=layouts)
        best = min(best, time.process_time() - start)
    Path(f"{out}-{world}-{rank}").write_text(str(best))
    dist.destroy_process_group()


def scaling(folder: Path, width: int = 2048, head: int = 64, turns: int = 2) -> dict[str, float]:
    """Processor seconds of one process, of each of two that share its work, and of one with half of it.

    Half of the work may take less than half of the time: smaller buffers are used again, where larger ones may have to
    be fetched from the system and cleared anew. So a rank of two is compared with a process that has its part alone,
    too.
    """
    runs = {"one": (1, width), "half": (1, width // 2), "two": (2, width)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name, (world, rows) in runs.items():
            out = str(folder / f"{name}-{turn}")
            mp.spawn(draw_shards, (world, f"{out}-rendezvous", rows, width, head, out), nprocs=world)
            times[name].append(max(float(Path(f"{out}-{world}-{rank}").read_text()) for rank in range(world)))
    best = {name: min(each) for name, each in times.items()}
    return {
        "width": width,
        "head_dim": head,
        **{name: round(seconds, 4) for name, seconds in best.items()},
        "ratio": round(best["one"] / best["two"], 3),
        "ratio_of_half_alone": round(best["one"] / best["half"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=("scaling", "8b", "70b"), help="measure one part and keep the others' results"
    )
    parser.add_argument(
        "--full", action="store_true", help="measure only the whole 8B model, and keep the others' results"
    )
    options = parser.parse_args()
    only = "full" if options.full else options.only
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if only in (None, "scaling"):
            found["scaling"] = scaling(folder)
        if only in (None, "8b"):
            found["llama_8b_attention"] = streamed(LLAMA_8B, folder, "--shard-size", "1GB", "--attention-only")
        if only in (None, "70b"):
            layers = LLAMA_70B["num_hidden_layers"]
            less = LLAMA_70B | {"num_hidden_layers": 2}
            two = streamed(less, folder, "--shard-size", "1GB", "--attention-only")
            found["llama_70b_attention"] = {
                "two_layers": two,
                "extrapolated_seconds": round(two["seconds"] * layers / 2, 1),
                "extrapolated_bytes": two["bytes"] * layers // 2,
                "extrapolation": f"{layers} layers are {layers // 2} times two; memory does not grow with layers",
            }
        if only == "full":
            if shutil.disk_usage(folder).free < 20e9:
                raise RuntimeError(f"{folder} has less than 20 GB free, which the whole model needs")
            found["llama_8b_full"] = streamed(LLAMA_8B, folder, "--shard-size", "5GB")
    found["environment"] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": 1,
        "load_average": os.getloadavg()[0],
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

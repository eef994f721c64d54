"""Measure what a model of billions of parameters costs: ``python -m benchmarks.sharded``.

Llama-3-8B's attention (published shape: width 4096, 32 heads of 128, 8 K/V heads, 32 layers) is streamed to disk, two
layers of the 70B's (width 8192, 64 heads, 80 layers) likewise with the whole worked out from them, and one and two
processes draw the shards of one layer. Writes benchmarks/results/sharded.json; the weights are deleted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

RESULTS = Path(__file__).parent / "results" / "sharded.json"
LLAMA_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA_8B |= {"num_hidden_layers": 32, "vocab_size": 128256}
LLAMA_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
LLAMA_70B |= {"num_hidden_layers": 80, "vocab_size": 128256}


def streamed(config: dict[str, int], folder: Path, *more: str) -> dict[str, float]:
    """Seconds, bytes and peak memory of one run of the command line in a process of its own."""
    (folder / "config.json").write_text(json.dumps(config))
    out = folder / "out"
    command = [sys.executable, "-m", "conditioned_kernels", "init", "transformers:llama", "--config"]
    command += [str(folder / "config.json"), "--out", str(out), "--dtype", "bf16", "--shard-size", "1GB", *more]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"{command} failed: {said}")
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    print(said.strip().splitlines()[-2])
    return {
        "seconds": round(seconds, 2),
        "bytes": size,
        "gigabytes_per_second": round(size / seconds / 1e9, 4),
        "peak_rss_bytes": used.ru_maxrss * 1024,
        "said": said.strip().splitlines()[-2],
    }


class Attention(nn.Module):
    """W_Q and W_K of one layer as one user class has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(width, width, bias=False, device="meta") for _ in "qk")


def draw_shards(rank: int, world: int, rendezvous: str, width: int, head: int, out: str) -> None:
    """One rank's part of one layer, timed alone and then among the others, best of five."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import conditioned_kernels as ck

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    model = Attention(width)
    for layer in (model.q, model.k):
        layer.weight = nn.Parameter(distribute_tensor(torch.empty(width, width), mesh, [Shard(0)], src_data_rank=None))
    layouts = {
        Attention: lambda module: {
            "q": module.q.weight.unflatten(0, (-1, head)),
            "k": module.k.weight.unflatten(0, (-1, head)),
        }
    }
    best = math.inf
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        ck.conditioned_(model, layouts=layouts)
        best = min(best, time.perf_counter() - start)
    Path(f"{out}-{world}-{rank}").write_text(str(best))
    dist.destroy_process_group()


def scaling(folder: Path, width: int = 2048, head: int = 64, turns: int = 2) -> dict[str, float]:
    """Seconds per rank with one process and with two, one thread each, interleaved twice."""
    times: dict[int, list[float]] = {1: [], 2: []}
    for turn in range(turns):
        for world in (1, 2):
            out = str(folder / f"time-{turn}")
            mp.spawn(draw_shards, (world, str(folder / f"rendezvous-{turn}-{world}"), width, head, out), nprocs=world)
            times[world].append(max(float(Path(f"{out}-{world}-{rank}").read_text()) for rank in range(world)))
    one, two = min(times[1]), min(times[2])
    return {"width": width, "head_dim": head, "one": round(one, 4), "two": round(two, 4), "ratio": round(one / two, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", choices=("scaling", "8b", "70b"), help="measure one part and keep the others' results"
    )
    only = parser.parse_args().only
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if only in (None, "scaling"):
            found["scaling"] = scaling(folder)
        if only in (None, "8b"):
            (folder / "8b").mkdir()
            found["llama_8b_attention"] = streamed(LLAMA_8B, folder / "8b", "--attention-only")
        if only in (None, "70b"):
            (folder / "70b").mkdir()
            two = streamed(LLAMA_70B | {"num_hidden_layers": 2}, folder / "70b", "--attention-only")
            layers = LLAMA_70B["num_hidden_layers"]
            found["llama_70b_attention"] = {
                "two_layers": two,
                "extrapolated_seconds": round(two["seconds"] * layers / 2, 1),
                "extrapolated_bytes": two["bytes"] * layers // 2,
                "extrapolation": f"{layers} layers are {layers // 2} times two; memory does not grow with layers",
            }
    found["environment"] = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "threads": 1,
        "load_average": os.getloadavg()[0],
        "peak_rss_of_children_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

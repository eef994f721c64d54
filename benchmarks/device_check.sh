#!/usr/bin/env bash
# Everything that needs a GPU, in one command: build the extension for this chip, GPU tests, compute-sanitizer on a
# small case, benchmark. At most eight minutes; needs torch, triton, pytest and nvcc, and no network. The table comes last.
# Usage: benchmarks/device_check.sh [folder for results, default benchmarks/results]
set -u
cd "$(dirname "$0")/.."
results=${1:-benchmarks/results}
mkdir -p "$results"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
started=$SECONDS
status=0

step() { # step NAME SECONDS COMMAND...: the command's output goes to NAME.log and, in short, here.
  local name=$1 limit=$2 code=0
  shift 2
  timeout "$limit" "$@" >"$results/$name.log" 2>&1 || code=$?
  echo "== $name: exit $code at $((SECONDS - started)) s"
  tail -n 15 "$results/$name.log"
  [ $code -eq 0 ] || status=1
}

chip=$($python -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || { echo "no GPU that torch sees"; exit 1; }
name=$($python -c 'import torch; print(torch.cuda.get_device_name().replace(" ", "-"))')
echo "== $name, compute capability $chip"

TORCH_CUDA_ARCH_LIST=$chip MAX_JOBS=$(nproc) CK_FORCE_EXTENSION=1 step build 60 $python -m conditioned_kernels.build
step backends 30 $python -c 'import conditioned_kernels as ck
for backend, sentence in ck.backends().items(): print(backend, "-", sentence)'
tests=(tests/test_gpu_triton.py)
[ -f tests/test_gpu.py ] && tests+=(tests/test_gpu.py)
# Most of the time is compiling, which processes share through Triton's cache.
parallel=()
$python -c 'import xdist' 2>/dev/null && parallel=(-n 8)
step tests 120 $python -m pytest -q -p no:cacheprovider -o addopts= "${parallel[@]}" "${tests[@]}"
if command -v compute-sanitizer >/dev/null; then
  # The Python allocator would hide an overrun inside a cached block.
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 step sanitizer 45 compute-sanitizer --tool memcheck --error-exitcode 9 $python -c '
import torch, conditioned_kernels as ck
for dtype in (torch.float32, torch.bfloat16):
    ck.orthogonalize(torch.randn(2, 17, 63, device="cuda").to(dtype), backend="triton")
    ck.semi_orthogonal((2, 33, 70), dtype=dtype, device="cuda", backend="triton")
print("ran")'
else
  echo "== sanitizer: compute-sanitizer is not installed, skipped"
fi
mkdir -p "$results/bench"
# The same cases, floors and tables as on a CPU; without the command line, whose packages need not be here.
step benchmark 240 $python -c '
import sys, torch
from pathlib import Path
from conditioned_kernels.bench import measure, tables
record = measure.run(torch.device("cuda"), budget=0.5, say=lambda what: print(what, file=sys.stderr, flush=True))
Path(sys.argv[1]).write_text(measure.as_json(record), encoding="utf-8")
print(tables.as_markdown(record))' "$results/bench/$name.json"
$python -c 'import sys, json; from conditioned_kernels.bench import tables
print(tables.as_markdown(json.load(open(sys.argv[1], encoding="utf-8"))))' "$results/bench/$name.json"
echo "== $((SECONDS - started)) s in all; $results/bench/$name.json; $([ $status -eq 0 ] && echo all passed || echo SOMETHING FAILED)"
exit $status

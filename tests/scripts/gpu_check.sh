#!/usr/bin/env bash
# What only a GPU can show, on a machine that has one; under 8 minutes, a table last.
#   gpu_check.sh [LIBCUDA]    the driver's library; default: the one that the system finds
# It says plainly what could not be run. Exit status: 0 only where a GPU was there and all that ran
# was right. GPU_CHECK_SIZE=tiny with the emulated driver shows that the script itself works.
set -uo pipefail
cd "$(dirname "$0")/../.."
library=${1:-libcuda.so.1}
size=${GPU_CHECK_SIZE:-full}
out=${GPU_CHECK_OUT:-target/gpu-check}
mkdir -p "$out"
rm -f "$out"/*.log
not_run=() faults=()

step() { # name, seconds, command..: a log of its own, and the verdict
  local name=$1 limit=$2
  shift 2
  if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
    echo "ok       $name"
  else
    local status=$?
    echo "FAILED   $name (exit $status), $out/$name.log ends:"
    tail -n 15 "$out/$name.log"
    faults+=("$name")
    return 1
  fi
}
skip() {
  echo "NOT RUN  $1: $2"
  not_run+=("$1;")
}

if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader
fi
if ! command -v g++ >/dev/null; then
  skip "kernels, rates" "g++ is missing"
elif ! { for program in kernels_test kernels_bench; do
  g++ -std=c++17 -O2 -o "$out/$program" "tests/fake_cuda/$program.cpp" -ldl || exit 1
done; }; then
  faults+=(build)
elif ! "$out/kernels_test" "$library" kernels/kernels.ptx none >"$out/probe.log" 2>&1; then
  echo "FAILED   no usable CUDA device through $library: $(tail -n 1 "$out/probe.log")"
  faults+=(device)
else
  for topic in select gemm attend; do step "kernels-$topic" 60 "$out/kernels_test" "$library" kernels/kernels.ptx "$topic"; done
  step rates 120 "$out/kernels_bench" "$library" kernels/kernels.ptx "$size"
fi
if [ "$size" = tiny ]; then
  skip torch "GPU_CHECK_SIZE=tiny"
elif ! python3 -c 'import torch' 2>/dev/null; then
  skip torch "PyTorch is not installed here"
else
  step torch 90 python3 tests/scripts/gpu_check_torch.py
fi
tests=${GPU_CHECK_TESTS:-}
if [ -z "$tests" ]; then
  skip "the backend's tests on the real driver" "GPU_CHECK_TESTS names no built test binary (cargo test --no-run --test cuda)"
else
  step backend-tests 150 env FAKE_CUDA_FLAVOUR=real "$tests" --test-threads 1
fi
skip "tokens per second of the engine" "nothing makes the large random models yet"
echo
echo "| kernel               | shape                  | us         | GB/s     | of copy | TFLOP/s  |"
echo "| -------------------- | ---------------------- | ---------- | -------- | ------- | -------- |"
cat "$out"/rates.log "$out"/torch.log 2>/dev/null | grep '^|'
echo
echo "of copy: bytes of the weights per second over those of a device copy; targets: 75 % at 4 bit and"
echo "85 % at 8 and 16 bit for products of few rows, half of torch's TFLOP/s at 512 and 2048 rows"
[ ${#not_run[@]} -eq 0 ] || echo "NOT RUN: ${not_run[*]}"
if [ ${#faults[@]} -gt 0 ]; then
  echo "FAILED: ${faults[*]}"
  exit 1
fi

#!/usr/bin/env bash
# What to run on a machine with GPUs, in order of worth, within 30 minutes: tests/gpu_hour.sh [FOLDER]
# Each step leaves its log and one row of a Markdown table in FOLDER (default: gpu-hour). Interrupted, it continues
# with the first step without a row. The table, FOLDER/results.md, goes into tests/bench/README.md.
# $PYTHON is the Python of an environment with '.[test]'; default: python.
set -uo pipefail
out=$(realpath -m "${1:-gpu-hour}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python}
deadline=$((SECONDS + ${GPU_HOUR_SECONDS:-1800}))
number=0
mkdir -p "$out"

# step TITLE LIMIT_SECONDS COMMAND...: run the command unless its row exists; write the row. The result is the last line
# of the output, or "failed" with the log's name.
step() {
  local title=$1 limit=$2 began=$SECONDS status result
  shift 2
  number=$((number + 1))
  local name
  name=$(printf '%02d' "$number")
  [ -s "$out/$name.row" ] && return
  local left=$((deadline - SECONDS))
  if [ "$left" -le 0 ]; then
    echo "no time left for: $title"
    return
  fi
  echo "$title ..."
  timeout --kill-after=20 "$((limit < left ? limit : left))" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ "$status" = 124 ] && [ "$limit" -gt "$left" ]; then
    echo "no time left for: $title"
    return
  fi
  result=$(grep -v '^| ' "$out/$name.log" | tail -n 1 | tr -d '|')
  [ "$status" = 0 ] || result="failed with exit code $status (see $name.log): $result"
  {
    echo "| $title | $result | $((SECONDS - began)) s |"
    sed -n 's/^\(| .*\)|$/\1| |/p' "$out/$name.log"
  } >"$out/$name.row"
  tail -n 1 "$out/$name.row"
}

gpu_tests() {
  "$python" -m pytest -q -p no:cacheprovider -m gpu "$@"
}
export -f gpu_tests
export python

runs=tests/end_to_end/test_gpu.py
step "DDP on 1 to N GPUs equals CPU ranks" 240 bash -c "gpu_tests $runs -k equal_cpu"
step "hung rank and failed assertion under NCCL" 180 bash -c "gpu_tests $runs -k 'hung or assert'"
step "torch.compile and CUDA graphs with DDP and EMA" 300 bash -c "gpu_tests $runs -k compiled"
step "data pipelines: stream races, host syncs, equality" 180 bash -c "gpu_tests tests/engine/data"
step "resume with dropout; deterministic twice" 240 bash -c "gpu_tests $runs -k 'resume or deterministic'"
step "batch size auto" 120 bash -c "gpu_tests $runs -k auto"
step "readings agree with nvidia-smi" 60 bash -c "gpu_tests tests/tui/cli/test_gpus.py"
step "JPEG decoder: nvJPEG and libjpeg-turbo" 300 "$python" tests/bench/decoder.py 3
step "speed" 600 "$python" tests/bench/gpu.py 5
step "all other GPU tests" 400 bash -c "gpu_tests tests --ignore=$runs --ignore=tests/engine/data --ignore=tests/rehearsal"

{
  echo "| step | result | time |"
  echo "|---|---|---|"
  cat "$out"/*.row
} >"$out/results.md"
cat "$out/results.md"

#!/usr/bin/env bash
# Everything that only a machine with a GPU can tell, in one command and within LIMIT seconds, the most telling first:
#
#   benchmarks/gpu_session.sh [--dry | --tiny] [part ...]
#
# Parts, the first six by default, with their limits:
#   doctor    python -m powersgd_triton doctor
#   first     one hook step: compared with plain torch, and timed beside torch's hook
#   tests     the correctness tests on the device. They compile some 287 kernels: in parallel, with pytest-xdist
#   bench     the benchmarks: NAME.json, NAME.md, NAME.png
#   trace     where a step's time goes on the device
#   sanitize  the tests of orthogonalization with the sanitizers that this version of Triton has
#   smoke     the benchmarks on a tiny gradient set
#   tune      alternatives for the launch table, ranks 4, 32 and 64
#
# --dry prints what would run for how long. --tiny runs bench and trace with a tiny gradient set, without a GPU too.
# PYTHON (python3) needs torch, triton, numpy, pytest and pytest-benchmark; this package need not be installed.
# Results and logs go to OUT (benchmarks/results), the files are called NAME (gpu), LIMIT is 570, and compiled kernels
# are kept in CACHE ($OUT/triton-cache).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3} NAME=${NAME:-gpu} LIMIT=${LIMIT:-570}
export OUT=${OUT:-benchmarks/results} PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
export TRITON_CACHE_DIR=${CACHE:-$OUT/triton-cache}
unset TRITON_INTERPRET
declare -A limits=([doctor]=40 [first]=80 [tests]=190 [bench]=180 [trace]=40 [sanitize]=30)

show="" tiny=()
case ${1:-} in
  --dry) show=1 && shift ;;
  --tiny) tiny=(--dry) && shift ;;
esac
parts=("$@")
[[ $# -gt 0 ]] || parts=(doctor first tests bench trace sanitize)
# One part alone may take as long as it likes.
[[ ${#parts[@]} -gt 1 ]] || limits[${parts[0]}]=$LIMIT
planned=0
[[ -n $show ]] || mkdir -p "$OUT"

summary=()
tests="not run"

# run PART SECONDS COMMAND...: for so long at most, into a log; gives the command's status.
run() {
  local part=$1 seconds=$2 status
  shift 2
  if [[ -n $show ]]; then
    planned=$((planned + seconds))
    printf '%-10s %4s s  %s\n' "$part" "$seconds" "$*"
    return 0
  fi
  ((seconds <= LIMIT - SECONDS)) || seconds=$((LIMIT - SECONDS))
  if ((seconds < 5)); then
    summary+=("$part: no time left")
    return 124
  fi
  echo "=== $part (at most $seconds s): $*"
  timeout --kill-after 10 "$seconds" "$@" 2>&1 | tee "$OUT/$NAME-$part.log"
  status=${PIPESTATUS[0]}
  case $status in
    0) summary+=("$part: done") ;;
    5) summary+=("$part: no tests there") ;;
    124 | 137) summary+=("$part: cut off after $seconds s") ;;
    *) summary+=("$part: failed, see $OUT/$NAME-$part.log") ;;
  esac
  return "$status"
}

pytest=("$PYTHON" -m pytest -q -p no:cacheprovider)
failed=0
for part in "${parts[@]}"; do
  case $part in
    doctor) run doctor "${limits[doctor]}" "$PYTHON" -m powersgd_triton doctor ;;
    first)
      run first "${limits[first]}" "${pytest[@]}" benchmarks/test_gpu_hook_step.py -m gpu --benchmark-quiet "${tiny[@]}" \
        -k "gpt2-124M and r4 and fp32 and not reference or tiny" --record "$NAME-first"
      ;;
    tests)
      parallel=()
      ! "$PYTHON" -c "import xdist" 2>/dev/null || parallel=(-n auto)
      run tests "${limits[tests]}" "${pytest[@]}" tests/kernels tests/ops tests/core -m gpu "${parallel[@]}"
      status=$?
      case $status in
        0) tests=passed ;;
        5) tests="none there" ;;
        124 | 137) tests="cut off" ;;
        *) tests=failed ;;
      esac
      ((status != 5)) || status=0
      (exit "$status")
      ;;
    bench)
      # With what the parts before have left. Beside the budget: the start, the last benchmark and the tables.
      seconds=${limits[bench]} left=$((LIMIT - SECONDS - limits[trace] - limits[sanitize]))
      [[ -n $show ]] || ((left <= seconds)) || seconds=$left
      run bench "$seconds" "${pytest[@]}" benchmarks -m gpu --benchmark-quiet "${tiny[@]}" \
        --record "$NAME" --tests "$tests" --budget $((seconds - 40))
      ;;
    trace) run trace "${limits[trace]}" "$PYTHON" benchmarks/tracing.py "${tiny[@]}" ;;
    sanitize)
      compiler=$("$PYTHON" -c 'import triton.backends.nvidia.compiler as c; print(c.__file__)')
      for mode in gsan consan; do
        grep -q "\"$mode\" in" "$compiler" || continue
        # Instrumented kernels are others than those in the cache.
        run "sanitize-$mode" $((limits[sanitize] / 2)) env TRITON_INSTRUMENTATION_MODE=$mode \
          "${pytest[@]}" tests/kernels/test_orthogonalize.py -m gpu
      done
      ;;
    smoke) run smoke 240 "${pytest[@]}" benchmarks -m gpu --benchmark-quiet --dry ;;
    tune)
      each=$(((LIMIT - SECONDS) / 3))
      for rank in 4 32 64; do
        run "tune-r$rank" "$each" "$PYTHON" benchmarks/tune.py --rank "$rank" --limit $((each - 30)) \
          "${tiny[@]}" --record "$NAME-tune-r$rank"
      done
      ;;
    *)
      echo "unknown part: $part; there are doctor, first, tests, bench, trace, sanitize, smoke and tune" >&2
      exit 2
      ;;
  esac || failed=1
done

if [[ -n $show ]]; then
  printf '%-10s %4s s\n' "together" "$planned"
  exit $((planned > LIMIT))
fi
echo
printf '%s\n' "${summary[@]}"
echo "written to $OUT"
exit "$failed"

#!/usr/bin/env bash
# Everything that only a machine with a GPU can tell, in one command and within LIMIT seconds:
#
#   benchmarks/gpu_session.sh [--dry] [part ...]
#
# Parts, the first four by default:
#   doctor  python -m powersgd_triton doctor
#   tests   the correctness tests on the device
#   bench   the benchmarks: NAME.json, NAME.md, NAME.png
#   trace   where a step's time goes on the device
#   smoke   the benchmarks on a tiny gradient set
#   tune    alternatives for the launch table, ranks 4, 32 and 64
#
# --dry runs bench and trace with a tiny gradient set, without a GPU too.
# PYTHON (python3) needs torch, triton, numpy, pytest and pytest-benchmark; this package need not be installed.
# Results and logs go to OUT (benchmarks/results), the files are called NAME (gpu), and LIMIT is 570.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=${PYTHON:-python3} NAME=${NAME:-gpu} LIMIT=${LIMIT:-570}
export OUT=${OUT:-benchmarks/results} PYTHONUNBUFFERED=1 PYTHONPATH=.${PYTHONPATH:+:$PYTHONPATH}
unset TRITON_INTERPRET
mkdir -p "$OUT"

dry=()
if [[ ${1:-} == --dry ]]; then
  dry=(--dry)
  shift
fi
parts=("$@")
[[ $# -gt 0 ]] || parts=(doctor tests bench trace)
summary=()
tests="not run"

# run PART SECONDS COMMAND...: for so long at most, into a log; gives the command's status.
run() {
  local part=$1 seconds=$2 status
  shift 2
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

# Options that leave out test modules which need packages that are not installed, also through tests/support.
ignore_what_cannot_be_imported() {
  "$PYTHON" -m pytest tests --collect-only -q -p no:cacheprovider 2>/dev/null | awk '
    / ERROR collecting / { file = $4 }
    /^E +ModuleNotFoundError: No module named .(hypothesis|sklearn|deepspeed)/ { print "--ignore=" file }'
}

pytest=("$PYTHON" -m pytest -q -p no:cacheprovider)
failed=0
for part in "${parts[@]}"; do
  case $part in
    doctor) run doctor 60 "$PYTHON" -m powersgd_triton doctor ;;
    tests)
      # Alone they may take as long as they like.
      [[ " ${parts[*]} " == *" bench "* ]] && seconds=180 || seconds=$LIMIT
      mapfile -t left_out < <(ignore_what_cannot_be_imported)
      run tests "$seconds" "${pytest[@]}" tests -m gpu --continue-on-collection-errors "${left_out[@]}"
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
      # Time for the trace, and for the start, the last benchmark and the tables beside the budget.
      seconds=$((LIMIT - SECONDS - 50))
      run bench "$seconds" "${pytest[@]}" benchmarks -m gpu --benchmark-quiet "${dry[@]}" \
        --record "$NAME" --tests "$tests" --budget $((seconds - 40))
      ;;
    trace) run trace 60 "$PYTHON" benchmarks/tracing.py "${dry[@]}" ;;
    smoke) run smoke 240 "${pytest[@]}" benchmarks -m gpu --benchmark-quiet --dry ;;
    tune)
      each=$(((LIMIT - SECONDS) / 3))
      for rank in 4 32 64; do
        run "tune-r$rank" "$each" "$PYTHON" benchmarks/tune.py --rank "$rank" --limit $((each - 30)) \
          "${dry[@]}" --record "$NAME-tune-r$rank"
      done
      ;;
    *)
      echo "unknown part: $part; there are doctor, tests, bench, trace, smoke and tune" >&2
      exit 2
      ;;
  esac || failed=1
done

echo
printf '%s\n' "${summary[@]}"
echo "written to $OUT"
exit "$failed"

#!/usr/bin/env bash
# Run what the ordinary run leaves out, file by file: tests/run_all.sh [nightly] [rehearsal] [soak] (default: all three)
# The results are in OUT (default: .run_all), in one folder per commit. A second call skips the files that passed, so an
# interrupted run continues. At the end: a table of all files, the tests that failed, and exit code 1 if there are any.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
out=${OUT:-.run_all}/$(git describe --always --dirty --exclude "*")
mkdir -p "$out"
[ $# -gt 0 ] || set -- nightly rehearsal soak
for level in "$@"; do
  # Soak tests measure memory and kill processes at random times: one at a time.
  processes=2
  [ "$level" = soak ] && processes=0
  "$python" -m pytest --collect-only -q -m "$level" | sed -n 's/::.*//p' | uniq > "$out/$level.files"
  [ -s "$out/$level.files" ] || { echo "no test has the marker $level" >&2; exit 2; }
  while read -r file; do
    result=$out/$level-${file//\//.}
    [ -e "$result.passed" ] && continue
    echo "$level $file"
    if "$python" -m pytest -q -m "$level" -n "$processes" "$file" < /dev/null > "$result.log" 2>&1
    then touch "$result.passed"
    else echo "  failed, see $result.log"
    fi
  done < "$out/$level.files"
done
failed=0
for log in "$out"/*.log; do
  printf '%-70s %s\n' "$(basename "$log" .log)" "$(tail -n 1 "$log")"
  [ -e "${log%.log}.passed" ] || failed=1
done
grep -hE '^(FAILED|ERROR)' "$out"/*.log || true
exit $failed

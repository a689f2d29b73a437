#!/usr/bin/env bash
# Run the suite with other versions of the dependencies than the installed ones: tests/oldest.sh [PYTEST OPTION…]
# Three runs, each in an environment of its own: `oldest`, the oldest release of every dependency that pyproject.toml
# allows; `newest`, the newest ones; `2.11`, the newest ones with that version of torch.
# RUNS="oldest 2.10" chooses the runs. PYTHON=python3.13 chooses the interpreter; a release without a wheel for it is skipped.
# Without the pictures of the screens, which differ between releases of rich.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
for run in ${RUNS:-oldest newest 2.11}; do
  case $run in
    oldest) versions=(--resolution lowest-direct) ;;
    newest) versions=() ;;
    *) versions=("torch==$run.*") ;;
  esac
  export VIRTUAL_ENV=$work/$run
  "${PYTHON:-python3.11}" -m venv "$VIRTUAL_ENV"
  "$VIRTUAL_ENV/bin/python" -m pip install --quiet uv
  "$VIRTUAL_ENV/bin/uv" pip install --quiet --only-binary :all: "${versions[@]}" -e '.[test]'
  "$VIRTUAL_ENV/bin/uv" pip list
  "$VIRTUAL_ENV/bin/python" -m pytest -q --ignore-glob 'tests/tui/screens/test_snapshots_*.py' "$@" || failed=1
done
exit "$failed"

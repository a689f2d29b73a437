#!/usr/bin/env bash
# Run the suite with the oldest release of every dependency that pyproject.toml allows: tests/oldest.sh [PYTEST OPTION…]
# UV_RESOLUTION=highest tests/oldest.sh runs it with the newest releases.
# Without the pictures of the screens, which differ between releases of rich.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3.11 -m venv "$environment"
"$environment/bin/python" -m pip install --quiet uv
export VIRTUAL_ENV=$environment
"$environment/bin/uv" pip install --quiet --resolution "${UV_RESOLUTION:-lowest-direct}" -e '.[test]'
"$environment/bin/uv" pip list
"$environment/bin/python" -m pytest -q --ignore tests/tui/screens/test_snapshots.py \
  --deselect tests/tui/screens/test_confusion.py::test_confusion_screen "$@"

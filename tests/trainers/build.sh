#!/usr/bin/env bash
# Build an environment for each trainer: tests/trainers/build.sh FOLDER [train_NAME.py ...]
# It gets the packages that its script names from the package index, on top of those of $PYTHON, which has torch.
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1") python=${PYTHON:-python}
shift
cd "$(dirname "$0")"
[ $# -gt 0 ] || set -- train_*.py
base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m pip freeze | grep -E '^torch(vision)?=' > "$folder/constraints"
for script; do
  environment=$folder/${script%.py}
  "$python" -m venv --clear --without-pip "$environment"
  echo "$base" > "$(echo "$environment"/lib/python*/site-packages)/base.pth"
  read -ra packages < <(sed -n 's/^# Needs: //p' "$script")
  "$python" -m pip --python "$environment/bin/python" install -q -c "$folder/constraints" "${packages[@]}"
done

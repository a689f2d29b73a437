#!/usr/bin/env bash
# What to run on a machine with GPUs, in stages of at most eight minutes, also without network: tests/gpu_hour.sh --help
# $PYTHON is the Python that has torch; default: python3.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/gpu_hour" "$@"

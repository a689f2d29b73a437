#!/usr/bin/env bash
# What to run on a machine with GPUs, half an hour, also without network: tests/gpu_hour.sh --help
# $PYTHON is a Python that has torch and what gputrain needs; default: python3.
exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/bench/gpu_hour.py" "$@"

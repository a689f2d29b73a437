#!/bin/sh
# Compile and run a program that prints its loss.
set -e
cc -o fit "$(dirname "$0")/fit.c"
./fit "$@"
echo done

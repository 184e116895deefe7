#!/bin/sh
# Measure on a GPU what simulated devices cannot show: benchmarks/gpu.sh FOLDER [--help]
# It needs an environment with PyTorch's CUDA build and the collector; PYTHON names its interpreter.
cd "$(dirname "$0")/.." || exit
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -P -m benchmarks.card "$@"

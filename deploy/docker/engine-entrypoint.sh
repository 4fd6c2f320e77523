#!/bin/sh
# Builds the CPU kernels for this machine's processor (seconds, once per cache), then becomes the engine.
command -v nvidia-smi >/dev/null 2>&1 || python -m pagewire_kernels.build \
  || echo "going on with the kernels of plain torch, which are slower" >&2
exec engine-service "$@"

#!/usr/bin/env bash
# Trains the nano models, one stage a call: scripts/train_nano.sh target|drafter
# Reads runs/nano/data (python -m lean_laguna.train.nano_run corpus makes it). Stage "drafter" reads the target from
# runs/nano/target, where stage "target" leaves it. Both may be killed and started again. Environment:
#   OUT      checkpoints and logs go to $OUT/target and $OUT/dflash (default runs/nano)
#   BUDGET   seconds for the whole stage (default 540)
#   PYTHON   interpreter (default python3)
set -euo pipefail
cd "$(dirname "$0")/.."
stage=${1:?usage: scripts/train_nano.sh target|drafter [options of nano_run]}
shift
out=${OUT:-runs/nano}
budget=${BUDGET:-540}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
run=("${PYTHON:-python3}" -m lean_laguna.train.nano_run "$stage" --data runs/nano/data --budget "$budget")
case $stage in
  target)
    "${run[@]}" --out "$out/target" "$@"
    if [ "$out" != runs/nano ]; then mkdir -p runs/nano && cp -r "$out/target" runs/nano/; fi
    ;;
  drafter) "${run[@]}" --target runs/nano/target --out "$out/dflash" "$@" ;;
  *) echo "unknown stage '$stage'; stages: target, drafter" >&2; exit 2 ;;
esac

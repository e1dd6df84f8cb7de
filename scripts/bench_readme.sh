#!/bin/sh
# The numbers of the README, written to results/. Usage: scripts/bench_readme.sh [folder of the executables]
set -eu
bin=${1:-.venv/bin}
cd "$(dirname "$0")/.."
mkdir -p results
"$bin/lean-laguna" bench --out results/bench.json --html results/bench.html
"$bin/lean-laguna" bench --prompts trivial --out results/bench_trivial.json
"$bin/lean-laguna" bench --temperature 0.8 --out results/bench_sampled.json
"$bin/lean-laguna" sweep --out results/sweep.json --svg results/sweep.svg
"$bin/lean-laguna" parity --out results/parity.json
"$bin/lean-laguna" parity --temperature 0.8 --seed 1 --out results/parity_sampled.json
if "$bin/python" -c 'import transformers' 2>/dev/null; then
    "$bin/python" scripts/compare_transformers.py --out results/transformers.json
else
    echo "transformers is not installed: the comparison with it is left out (make test installs it)" >&2
fi

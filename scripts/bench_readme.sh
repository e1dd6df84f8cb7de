#!/bin/sh
# Makes the files that the README's numbers come from. Usage: scripts/bench_readme.sh [folder of the venv's programs]
# About ten minutes on two quiet cores. Run it on an idle machine: ratios survive company, figures do not.
set -eu
cd "$(dirname "$0")/.."
bin=${1:-.venv/bin}
out=results
mkdir -p "$out"
"$bin/lean-laguna" bench --num-speculative-tokens 7 --out "$out/bench_greedy.json" --html "$out/bench_greedy.html"
"$bin/lean-laguna" bench --num-speculative-tokens auto --temperature 0.8 --seed 1 --repeats 2 --out "$out/bench_t08.json"
"$bin/lean-laguna" sweep --num-prompts 7 --out "$out/sweep.json" --svg "$out/sweep.svg"
"$bin/lean-laguna" parity --draft-lengths 1,3,7,15 --out "$out/parity_greedy.json"
"$bin/lean-laguna" parity --draft-lengths 1,3,7,15 --temperature 0.8 --seed 1 --out "$out/parity_t08.json"
"$bin/python" benchmarks/long_context.py --out "$out/long_context.json"
if "$bin/python" -c 'import transformers' 2>/dev/null; then
  "$bin/python" benchmarks/against_transformers.py --out "$out/against_transformers.json"
else
  echo "against_transformers.json not made: run 'make test' once, it installs transformers" >&2
fi

#!/usr/bin/env bash
# The whole pipeline on a small scale: target and corpus in, a measured draft out.
set -euo pipefail

usage() {
  cat <<'END'
usage: bash scripts/quickstart.sh [OPTION ...]

Trains a small target (unless one is given), captures its hidden states into a dataset, verifies
the dataset, fits an EAGLE-3 draft to it, and decodes real prompts with target and draft. This takes
some three minutes on two idle CPU cores after the installation, and downloads only Python packages. To resume a run
that was stopped, run it again with the same options.

options:
  --target MODEL   a model directory or Hub id           (default: a tiny Llama, trained here)
  --corpus FILE    JSONL chats to learn from             (default: made from the standard library)
  --prompts FILE   JSONL chats to decode, not trained on (default with --corpus: every 20th row of
                   it, at most --decode rows, which are then left out of the training)
  --out DIR        directory for all results             (default: quickstart/ in the repository)
  --limit N        rows of the corpus to use; 0 = all    (default: 1000)
  --steps N        optimizer steps of the draft          (default: 200)
  --decode N       prompts to decode                     (default: 24)

Environment: VENV (default .venv in the repository), PYTHON (3.11 or later, for a new one).
END
}

target="" corpus="" prompts="" out="" limit=1000 steps=200 decode=24
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --target | --corpus | --prompts | --out | --limit | --steps | --decode)
      if [ $# -lt 2 ]; then
        echo "error: $1 needs a value; see --help" >&2
        exit 2
      fi
      printf -v "${1#--}" '%s' "$2"
      shift 2
      ;;
    *)
      echo "error: unknown option $1; see --help" >&2
      exit 2
      ;;
  esac
done

# shellcheck source=scripts/_env.sh
source "$(dirname -- "${BASH_SOURCE[0]}")/_env.sh"
if [ -n "$target" ] && [ -z "$corpus" ]; then
  fail "--target $target needs --corpus FILE: chats of the kind that it will serve"
fi
for option in limit steps decode; do
  case "${!option}" in
    "" | *[!0-9]*) fail "--$option ${!option}: not a whole number" ;;
  esac
  printf -v "$option" '%d' "$((10#${!option}))"
done
if [ -n "$corpus" ] && [ ! -f "$corpus" ]; then fail "--corpus $corpus: no such file"; fi
if [ -n "$prompts" ] && [ ! -f "$prompts" ]; then fail "--prompts $prompts: no such file"; fi
out="${out:-$ROOT/quickstart}"
prepare_env ""
mkdir -p "$out"

# About how many seconds each step takes with the built-in target on two idle cores, in order. The
# time left is the sum of the remaining ones, scaled by the pace of the steps so far.
rows=$((limit > 0 ? limit : 10000))
seconds=(5 $((8 + rows / 80)) 6 5 $((6 + steps * 3 / 10)) $((6 + decode * 2 / 3)) $((6 + decode / 3)))
if [ -z "$target" ] && [ ! -f "$out/target/prompts.jsonl" ]; then seconds=(55 "${seconds[@]}"); fi
number=0 passed=0 total=0 own_target="$target"
for each in "${seconds[@]}"; do total=$((total + each)); done
SECONDS=0 # counted by bash

# Announces the next step: its number, a bar of all steps, and about how long they still take.
step() {
  local bar="####################" rest="--------------------" filled left words=""
  filled=$((20 * passed / total))
  if [ -z "$own_target" ]; then
    # The first 30 seconds count as exactly on time, so that one fast step does not mislead.
    left=$(((total - passed) * (SECONDS + 30) / (passed + 30)))
    words=", less than a minute left"
    if [ "$left" -ge 60 ]; then words=", about $(((left + 30) / 60)) min left"; fi
  fi
  passed=$((passed + seconds[number]))
  number=$((number + 1))
  printf '\n[%d/%d] [%s%s] %s%s\n' "$number" "${#seconds[@]}" "${bar:0:filled}" "${rest:filled}" \
    "$1" "$words" >&2
}

run() {
  printf '$ %s\n' "$*" >&2
  "$VENV/bin/$1" "${@:2}"
}

recipe=()
if [ -z "$target" ]; then
  recipe=(--draft-vocab-size 1024) # the target's own vocabulary has 3072 tokens
  target="$out/target"
  if [ ! -f "$target/prompts.jsonl" ]; then # the last file that make_target.py writes
    step "train a small target on the text of the standard library"
    "$PY" "$ROOT/scripts/make_target.py" --out "$target"
  fi
  if [ -z "$corpus" ]; then
    corpus="$target/corpus.jsonl"
    prompts="${prompts:-$target/prompts.jsonl}"
  fi
fi
if [ -z "$prompts" ]; then
  say "keeping every 20th row of $corpus for decoding, $decode at most"
  awk -v n="$decode" -v held="$out/prompts.jsonl" -v kept="$out/corpus.jsonl" \
    '{ file = kept; if (NR % 20 == 0 && n > 0) { file = held; n-- } print > file }' "$corpus"
  corpus="$out/corpus.jsonl" prompts="$out/prompts.jsonl"
  [ -f "$prompts" ] || fail "$corpus has fewer than 20 rows; name a file of prompts with --prompts"
fi

capture=(--target "$target" --corpus "$corpus" --limit "$limit" --out "$out/dataset")
# Many CPUs multiply bfloat16 matrices 50 times more slowly than float32 ones.
if [ -z "$own_target" ]; then capture+=(--dtype float32); fi
step "estimate the size of the dataset"
run spec-data estimate "${capture[@]}"
step "capture the target's hidden states"
run spec-data generate "${capture[@]}"
step "verify the dataset against its target"
run spec-data verify "$out/dataset" --target "$target" --samples 8

fit=(fit eagle3 --data "$out/dataset" --seq-len 1024 --batch-size 1 ${recipe[@]+"${recipe[@]}"})
step "make an untrained draft, to compare with"
run spec-train "${fit[@]}" --steps 0 --out "$out/untrained"
step "fit the draft"
run spec-train "${fit[@]}" --steps "$steps" --eval-every 100 --save-every 100 --out "$out/run"
for draft in untrained run; do
  if [ "$draft" = run ]; then step "decode with the draft"; else step "decode with the untrained draft"; fi
  run spec-train eval --draft "$out/$draft" --data "$out/dataset" --target "$target" \
    --prompts "$prompts" --limit "$decode" --max-new-tokens 64 --json "$out/$draft.json"
done
say "all ${#seconds[@]} steps are done, in $((SECONDS / 60)) min $((SECONDS % 60)) s"

"$PY" "$ROOT/scripts/quickstart_table.py" "$out"

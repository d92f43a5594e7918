#!/usr/bin/env bash
# What eight GPUs of one host are to show, in one command of at most nine minutes: builds, checks, times, writes JSON.
#
#   bash scripts/run_eight.sh OUT [RANKS] [LAYERS] [STEPS]
#
# OUT gets a log and the JSON of every stage, and summary.json. RANKS GPUs are used, 1, 2, 4 or 8 (default 8); LAYERS of
# the released model (default 62 on 8 GPUs, 8 on fewer); STEPS of nano (default 100,000 on 8, 4,096 on fewer). On fewer
# GPUs it is a rehearsal of the same stages. A stage has a limit, and what is left of the nine minutes; if one of the
# first three fails, the others are not run. Exit code 1 if any failed, 2 for wrong arguments.
#
# PYTHON (default python3) has JAX with CUDA and pytest. MUSEJAX_SITE is a folder in which the package lies built; else
# it is built into OUT/site, for which PYTHON needs scikit-build-core and nanobind, and the machine nvcc.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

usage() { echo "run_eight.sh: error: $1" >&2; exit 2; }
[[ $# -ge 1 && $# -le 4 ]] || usage "expected OUT [RANKS] [LAYERS] [STEPS], got $# arguments"
out=$1 ranks=${2:-8} python=${PYTHON:-python3}
[[ $ranks =~ ^[1248]$ ]] || usage "RANKS: expected 1, 2, 4 or 8, got $ranks"
layers=${3:-$((ranks == 8 ? 62 : 8))} steps=${4:-$((ranks == 8 ? 100000 : 4096))}
[[ $layers =~ ^[0-9]+$ && $layers -ge 4 && $layers -le 62 ]] || usage "LAYERS: expected 4 to 62, got $layers"
[[ $steps =~ ^[1-9][0-9]*$ ]] || usage "STEPS: expected 1 or more, got $steps"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')
[[ $gpus -ge $ranks ]] || usage "expected $ranks GPUs, found $gpus: ask for fewer RANKS"
mkdir -p "$out" && out=$(cd "$out" && pwd) || usage "OUT: expected a folder that can be made, got $1"

limit=540 failed=0
export PYTHONUNBUFFERED=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
export PYTHONPATH=${MUSEJAX_SITE:-$out/site}
: >"$out/stages.tsv"

# stage NAME SECONDS COMMAND...: its output goes to OUT/NAME.log; the last lines of it are shown if it fails.
stage() {
  local name=$1 most=$2 begin=$SECONDS code=0
  shift 2
  ((most = most < limit - SECONDS ? most : limit - SECONDS))
  if ((most <= 0)); then
    code=124
  else
    timeout -k 5 "$most" "$@" >"$out/$name.log" 2>&1 || code=$?
  fi
  printf '%s\t%s\t%s\n' "$name" "$code" $((SECONDS - begin)) >>"$out/stages.tsv"
  echo "[$SECONDS s] $name: $([[ $code == 0 ]] && echo passed || echo "exit code $code")"
  if ((code)); then failed=1; tail -n 15 "$out/$name.log" 2>/dev/null; fi
  return "$code"
}

build() {
  MUSEJAX_CUDA=ON MUSEJAX_CUDA_ARCHS=90a CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    "$python" -m pip install . --no-build-isolation --no-deps --target "$out/site"
}

# Flag and exchange between GPUs $1 and $2; the first pair also the tear test.
pair() {
  local groups=(peer)
  [[ $1 == 0 && $2 == $((ranks - 1)) ]] && groups+=(tear)
  CUDA_VISIBLE_DEVICES=$1,$2 "$python" -P -m musejax.cli bench limits --only "${groups[@]}" \
    --json "$out/peer-$1-$2.json"
}

# All pairs, in rounds in which no GPU is in two pairs: GPU ranks - 1 stays, the others go round.
peers() {
  local round i a b code=0 running
  if ((ranks == 1)); then
    CUDA_VISIBLE_DEVICES=0 "$python" -P -m musejax.cli bench limits --only tear --json "$out/peer-0.json"
    return
  fi
  for ((round = 0; round < ranks - 1; ++round)); do
    running=()
    for ((i = 0; i < ranks / 2; ++i)); do
      a=$(((round + i) % (ranks - 1)))
      b=$((i ? (round - i + ranks - 1) % (ranks - 1) : ranks - 1))
      pair $((a < b ? a : b)) $((a < b ? b : a)) &
      running+=($!)
    done
    for i in "${running[@]}"; do wait "$i" || code=1; done
    ((code == 0)) || return 1
  done
}

export -f pair peers build
export out ranks python

several=(); ((ranks > 1)) && several=(--devices "$ranks")
run() {
  [[ -n ${MUSEJAX_SITE:-} ]] || stage build 180 bash -c build || return
  stage peers 100 bash -c peers || return
  # nano and MINI, all activations, text, layers of the released sizes: one GPU beside several
  stage bits 150 "$python" -P -m pytest -q -x -p no:cacheprovider tests/gpu/test_devices.py \
    -k "several or rows or text or released" || return
  stage layer 40 "$python" -P -m musejax.cli bench layer --batches 5 "${several[@]}" --json "$out/layer.json"
  local distinct context
  for distinct in 49 102; do  # 102: what 16 rows hit on average if every expert is as likely
    for context in 2048 32768; do
      stage "step-d$distinct-c$context" 60 "$python" -P -m musejax.cli bench step --layers "$layers" --batches 5 \
        --distinct "$distinct" --context "$context" "${several[@]}" --json "$out/step-d$distinct-c$context.json"
    done
  done
  stage soak 170 "$python" -P scripts/soak.py --reference 1 --devices "$ranks" --steps "$steps" --seconds 160
}
run

"$python" - "$out" "$ranks" "$layers" <<'PY'
import json
import pathlib
import sys

out, ranks, layers = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
stages = [line.split("\t") for line in (out / "stages.tsv").read_text().splitlines()]
results = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if path.stem != "summary"}
summary = {"ranks": ranks, "layers": layers, "results": results,
           "stages": [{"name": n, "exit_code": int(code), "seconds": int(s)} for n, code, s in stages]}
(out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
print(f"\n{'stage':<18} {'exit':>4} {'s':>4}")
for name, code, seconds in stages:
    print(f"{name:<18} {code:>4} {seconds:>4}")
for name, _, _ in stages:
    if name.startswith(("layer", "step", "soak")):
        lines = (out / f"{name}.log").read_text().splitlines() if (out / f"{name}.log").exists() else []
        print(f"{name}: {lines[-1] if lines else 'nothing'}")
print("published, on 8 GB300, other hardware: 1,109 tokens/s")
PY
exit "$failed"

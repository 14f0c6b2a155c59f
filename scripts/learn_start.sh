#!/usr/bin/env bash
# The start of one seed of the learning experiment: tasks and demonstrations, shared by all seeds, and its own start model
# and SFT. Finished parts are kept. WORK=DIR: where models, runs and tasks lie.
#   scripts/learn_start.sh VENV SEED [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
T1=$1/bin/t1 SEED=$2 WORK=${WORK:-.}
shift 2
SET=$WORK/tasks/learn BASE=$WORK/models/learn-$SEED SFT=$WORK/runs/learn-sft-$SEED
COMMON=(experiment=learn generate.out="$SET" env.tasks="$SET/train" eval.tasks="$SET/held_out"
        train.sft.demonstrations="$SET/demonstrations" "$@")

if [ -d "$SFT/model" ] && [ -d "$SET/train" ] && [ -d "$SET/held_out" ]; then exit 0; fi
"$T1" tasks generate "${COMMON[@]}"
[ -d "$BASE" ] || "$T1" model init "${COMMON[@]}" run.seed="$SEED" model.path="$BASE"
"$T1" tasks demonstrate "${COMMON[@]}" model.path="$BASE"
[ -d "$SFT/model" ] || "$T1" train sft "${COMMON[@]}" run.seed="$SEED" model.path="$BASE" run.dir="$SFT"

#!/usr/bin/env bash
# One seed of the learning experiment: its own start model and SFT, then PPO; tasks are shared by all seeds and rewards.
#   scripts/learn.sh VENV SEED REWARD [key=value ...]        REWARD: dense | binary | ratio
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
T1=$1/bin/t1 SEED=$2 REWARD=$3
shift 3
COMMON=(experiment=learn "$@")
BASE=models/learn-$SEED SFT=runs/learn-sft-$SEED RUN=runs/learn-$REWARD-$SEED

"$T1" tasks generate "${COMMON[@]}"
[ -d "$BASE" ] || "$T1" model init "${COMMON[@]}" run.seed="$SEED" model.path="$BASE"
"$T1" tasks demonstrate "${COMMON[@]}" model.path="$BASE"
[ -d "$SFT/model" ] || "$T1" train sft "${COMMON[@]}" run.seed="$SEED" model.path="$BASE" run.dir="$SFT"
"$T1" run "${COMMON[@]}" reward="$REWARD" run.seed="$SEED" model.path="$SFT/model" run.dir="$RUN"
"$T1" compare "$RUN"

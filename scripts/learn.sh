#!/usr/bin/env bash
# One seed of the learning experiment: its own start model and SFT, then PPO; tasks are shared by all seeds and rewards.
#   scripts/learn.sh VENV SEED REWARD [key=value ...]        REWARD: dense | binary | ratio
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
T1=$1/bin/t1 SEED=$2 REWARD=$3
WORK=. scripts/learn_start.sh "$1" "$SEED" "${@:4}"
shift 3
SFT=runs/learn-sft-$SEED RUN=runs/learn-$REWARD-$SEED

"$T1" run experiment=learn "$@" reward="$REWARD" run.seed="$SEED" model.path="$SFT/model" run.dir="$RUN"
"$T1" compare "$RUN"

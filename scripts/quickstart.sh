#!/usr/bin/env bash
# The whole loop on two CPU cores: tasks, a small model from a seed, demonstrations, SFT, critic warm-up, 3 PPO
# iterations, evaluation before and after. Finished parts are kept: start it again after an interruption.
#   scripts/quickstart.sh [VENV] [key=value ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
T1=${1:-.venv}/bin/t1
shift || true
COMMON=(experiment=quickstart "$@")
STARTED=$SECONDS

step() { printf '\n== %s (%d s so far)\n' "$1" $((SECONDS - STARTED)); }

step "tasks: Harbor-format terminal jobs, each proven in a sandbox"
"$T1" tasks generate "${COMMON[@]}"
step "a Qwen3-MoE with random weights and its tokenizer"
[ -d models/quickstart ] || "$T1" model init "${COMMON[@]}" model.path=models/quickstart
step "demonstrations of a scripted policy, some of them wrong on purpose"
"$T1" tasks demonstrate "${COMMON[@]}" model.path=models/quickstart
step "supervised fine-tuning: Megatron-Core, expert parallel over two processes"
[ -d runs/quickstart-sft/model ] || "$T1" train sft "${COMMON[@]}" model.path=models/quickstart run.dir=runs/quickstart-sft
step "reinforcement learning: rollout, critic, actor, export"
"$T1" run "${COMMON[@]}" model.path=runs/quickstart-sft/model run.dir=runs/quickstart
step "is the policy better than the one it started from?"
"$T1" compare runs/quickstart
printf '\nquickstart took %d s. Look at it with: %s show runs/quickstart\n' $((SECONDS - STARTED)) "$T1"

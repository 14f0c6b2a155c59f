#!/usr/bin/env bash
# Rollouts by the real vLLM and their audit: TASKS x SAMPLES short ones and LONG_EPISODES of more than 300 turns, then `t1 audit`
# with the re-render baseline, a sample scored again, and the report in docs/audit-report.json and .txt. Finished parts are kept:
# start it again after an interruption.
#   scripts/audit.sh [VENV] [key=value ...]          TASKS=500 SAMPLES=3 LONG_EPISODES=24 RESCORE=32 REPORT=FILE
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
T1=${1:-.venv}/bin/t1
shift || true
TASKS=${TASKS:-500} SAMPLES=${SAMPLES:-3} LONG_EPISODES=${LONG_EPISODES:-24} RESCORE=${RESCORE:-32}
REPORT=${REPORT:-docs/audit-report.json} WORK=${WORK:-.}
BASE=$WORK/models/audit SFT=$WORK/runs/audit-sft SHORT=$WORK/runs/audit LONG=$WORK/runs/audit-long SET=$WORK/tasks/audit
COMMON=(experiment=audit generate.out="$SET" train.sft.demonstrations="$SET/demonstrations"
        env.tasks="$SET/train" eval.tasks="$SET/held_out" "$@")
STARTED=$SECONDS

step() { printf '\n== %s (%d s so far)\n' "$1" $((SECONDS - STARTED)); }

step "tasks, a start model with room for long episodes, demonstrations, fine-tuning"
"$T1" tasks generate "${COMMON[@]}"
[ -d "$BASE" ] || "$T1" model init "${COMMON[@]}" model.path="$BASE"
"$T1" tasks demonstrate "${COMMON[@]}" model.path="$BASE"
[ -d "$SFT/model" ] || "$T1" train sft "${COMMON[@]}" model.path="$BASE" run.dir="$SFT"

step "$((TASKS * SAMPLES)) episodes"
"$T1" rollout "${COMMON[@]}" model.path="$SFT/model" run.dir="$SHORT" iteration=0 \
    rollout.tasks_per_iteration="$TASKS" rollout.samples_per_task="$SAMPLES"

# An episode goes on when the agent submits, or loses the format, before turn 310: it is answered instead. Such an agent
# soon stands far outside what the tiny model was trained on, which makes for turns of every kind.
step "$LONG_EPISODES episodes of more than 300 turns"
if [ ! -d "$SET-long" ]; then
    rm -rf "$SET-long.partial" && mkdir -p "$SET-long.partial"
    find "$SET/train" -mindepth 1 -maxdepth 1 -type d | sort | awk -v most="$LONG_EPISODES" 'NR <= most' |
        xargs cp -r -t "$SET-long.partial"
    sed -i 's/^timeout_sec = .*/timeout_sec = 7200.0/' "$SET-long.partial"/*/task.toml
    mv "$SET-long.partial" "$SET-long"
fi
"$T1" rollout "${COMMON[@]}" model.path="$SFT/model" run.dir="$LONG" iteration=0 env.tasks="$SET-long" \
    env.min_turns=310 env.max_turns=320 env.agent_timeout_s=7200 env.output_limit=60 \
    rollout.max_context=16384 rollout.max_tokens_per_turn=24 rollout.concurrency=8 \
    rollout.tasks_per_iteration="$LONG_EPISODES" rollout.samples_per_task=1 \
    train.actor.minibatches=1 train.critic.minibatches=1

step "audit"
"$T1" audit "$SHORT" "$LONG" --baseline rerender --rescore "$RESCORE" --report "$REPORT" | tee "${REPORT%.json}.txt"
printf '\nthe audit took %d s; report: %s\n' $((SECONDS - STARTED)) "$REPORT"

"""The commands of `t1`: which function each one calls, and what its `--help` says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    words: tuple[str, ...]
    target: str  # "module:function" in megatron_t1.commands; called with the Invocation
    summary: str
    details: str
    configured: bool = True  # takes Hydra overrides; otherwise plain arguments
    flags: tuple[str, ...] = ()  # options without a value that it takes beside overrides


COMMANDS = (
    Command(
        ("run",), "run:run", "the whole training: rollout, critic, actor, export, repeated",
        """\
Starts, or goes on with, the training in run.dir. What is finished (RUN/manifest.json) is not repeated; once
a step is, options that decide what is computed, and the files in model.path, must be those the run was started with.
Phases run one at a time, each in processes of its own; RUN/phases/iter_NNNN/PHASE/logs holds what they said.

  t1 run experiment=quickstart
  t1 run run.dir=runs/quickstart                    go on, with what the run was started with
  t1 run experiment=quickstart loop.iterations=6    go on for longer
  t1 run -m experiment=learn run.seed=0,1,2         a sweep: one run after another, each in its own directory""",
    ),
    Command(
        ("rollout",), "run:phase", "one rollout phase of a run",
        """\
Samples one iteration's trajectories: starts the engine, runs the episodes in sandboxes, verifies, writes
RUN/rollouts/iter_NNNN. Episodes that are already there are not repeated.

  t1 rollout run.dir=runs/quickstart iteration=0    iteration=-1 (default): the first that is not finished""",
    ),
    Command(
        ("train", "sft"), "outside:sft", "supervised fine-tuning on demonstrations: the model a training starts from",
        """\
Reads model.path and train.sft.demonstrations, writes RUN/model. Use a run.dir of its own.

  t1 train sft run.dir=runs/sft model.path=models/tiny_start train.sft.demonstrations=tasks/demonstrations""",
    ),
    Command(
        ("train", "critic"), "outside:critic", "one critic phase of a run, or a warm-up on stored rollouts",
        """\
Values, advantages and returns for one iteration's rollouts, then the value update. Writes RUN/values/iter_NNNN and
RUN/checkpoints/critic. The actor's files are not touched.

  t1 train critic run.dir=runs/quickstart

With train.critic.rollouts, a warm-up on stored rollouts alone (runs, RUN/rollouts, RUN/rollouts/iter_NNNN or imported
records) until the explained variance on held-out tasks stops rising, in a run.dir of its own. Starts from the policy in
model.path, which isn't touched; writes RUN/critic (the best critic), a table and a plot. A run takes it by
train.critic.start.

  t1 train critic run.dir=runs/critic model.path=runs/sft/model 'train.critic.rollouts=[runs/a,runs/b/rollouts]'
  t1 run run.dir=runs/c model.path=runs/sft/model train.critic.start=runs/critic/critic loop.warmup_iterations=0""",
    ),
    Command(
        ("train", "actor"), "run:phase", "one actor phase of a run",
        """\
The PPO update of the policy, with the experts of the rollout replayed. Writes RUN/checkpoints/actor.

  t1 train actor run.dir=runs/quickstart""",
    ),
    Command(
        ("export",), "run:phase", "the newest actor as a Hugging Face directory",
        """\
Writes RUN/hf/iter_NNNN, which vLLM and transformers load.

  t1 export run.dir=runs/quickstart""",
    ),
    Command(
        ("eval",), "run:evaluate", "evaluate a policy of a run, or any model, on held-out tasks",
        """\
Without a run in run.dir, evaluates model.path there (policy 0). In a run, evaluates the policy of iteration=N, or the
newest exported one. Prints what a benchmark reports: resolved rate with intervals, checks, pass@k, tables by category
and difficulty, errors apart (docs/evaluation.md). Attempts that are there already are not repeated.

  t1 eval run.dir=runs/base model.path=models/my_model eval.tasks=tasks/held_out eval.attempts=4
  t1 eval run.dir=runs/quickstart
  t1 eval run.dir=runs/again model.path=runs/quickstart/hf/iter_0003 eval.tasks=tasks/held_out eval.attempts=8

A run keeps to its own eval options, so that its evaluations stay comparable. Other ones (attempts, tasks, max_turns,
temperature, limit) go to a run.dir of their own, as in the last line; `t1 compare A B` compares two of them.""",
    ),
    Command(
        ("tasks", "generate"), "inputs:generate", "write Harbor-format terminal tasks and prove each of them",
        """\
Writes generate.out/train and generate.out/held_out: disjoint by content; the reference solution of each passes all its
checks, and what passes when nothing is done is recorded.

  t1 tasks generate generate.out=tasks generate.train=500 generate.held_out=200""",
    ),
    Command(
        ("tasks", "check"), "tasks:check", "prove each task in a sandbox: which of them are worth training on?",
        """\
DIR: a directory of tasks (Harbor's or Terminal-Bench's format), or a list. For each task, from a fresh start each time:
doing nothing must not solve it, its reference solution must, and both must give the same verdict again. Writes
OUT/tasks.list (name it in env.tasks), OUT/baseline.json, OUT/table.txt and OUT/results.jsonl; an interrupted check goes
on. Exit status 1 when a task is not sound. docs/tasks.md explains the statuses.

  t1 tasks check DIR [key=value ...]   for example env.sandbox.memory_mb=4096
  --out OUT             default: DIR-checked
  --workers N           sandboxes at once (default 8)
  --repeats N           times that nothing, and the reference, are played (default 2)
  --with-unproven       list tasks without a reference solution as well
  --again STATUS        play tasks of this status again; may be repeated. Unbuildable ones always are
  --limit N             the first N tasks only""",
        configured=False,
    ),
    Command(
        ("tasks", "overlap"), "tasks:overlap", "how much of a benchmark is in a training set?",
        """\
Shared n-grams, near-duplicates and equal files of instruction, environment/ and tests/, and the worst pairs.

  t1 tasks overlap TRAIN BENCHMARK
  --max SHARE           exit status 1 when a larger share of the benchmark has a near-duplicate in TRAIN
  --ngram N             words of an n-gram (default 8)
  --pairs N             pairs shown (default 10)
  --out FILE            everything, as JSON""",
        configured=False,
    ),
    Command(
        ("tasks", "convert"), "tasks:convert", "Terminal-Bench tasks (task.yaml) as Harbor tasks",
        """\
By Harbor's own mapping. What it can't map is refused by name. `env.tasks` reads both formats; this writes them down.

  t1 tasks convert DIR OUT""",
        configured=False,
    ),
    Command(
        ("tasks", "preflight"), "base:preflight", "does this machine run sandboxes, and what bounds them here?",
        """\
Runs one command in a sandbox and prints what holds memory, processes, processor time, disk, system calls and network:
control groups where they can be written, limits of each process where not. See docs/sandboxes.md.

  t1 tasks preflight
  t1 tasks preflight env=terminal env.sandbox.base=bases/debian""",
    ),
    Command(
        ("tasks", "base"), "base:base", "a base system that stands in for FROM in bubblewrap sandboxes",
        """\
Made once, used by every sandbox: docs/sandboxes.md. Without --from, mmdebstrap makes one from Debian's packages.

  t1 tasks base bases/debian --pip pytest==8.4.1 pandas==2.3.2
  t1 tasks base bases/lab --from rootfs.tar.gz     a tarball as `docker export` writes, or a directory
  --suite NAME, --mirror URL, --packages A,B       of Debian, for mmdebstrap
  --pip REQUIREMENT ...   installed with the base's own pip, from wheels that this host's pip downloads
  --host-uid N            the user that sandboxes run as, where the driver is root (env.sandbox.host_uid)""",
        configured=False,
    ),
    Command(
        ("tasks", "demonstrate"), "inputs:demonstrate", "demonstrations of a scripted policy, for `t1 train sft`",
        """\
Runs a scripted policy through the same agent loop and sandboxes and writes its records to train.sft.demonstrations.
They are imperfect on purpose (generate.demonstration_noise), so that reinforcement learning has something to repair.

  t1 tasks demonstrate generate.demonstrations=7000""",
    ),
    Command(
        ("model", "init"), "inputs:init_model", "a small random model with its own tokenizer, from a seed",
        """\
Writes model.path: config.json, safetensors, tokenizer. The tokenizer is trained on text the task generator makes.

  t1 model init model=tiny model.path=models/tiny_start run.seed=0""",
    ),
    Command(
        ("convert", "check"), "convert:check", "is every tensor of a checkpoint accounted for, by model and layout?",
        """\
Compares a Hugging Face checkpoint, Qwen3-MoE or Qwen3.5-MoE, with the model that its config.json describes: every
tensor is trained, carried over to exports (vision tower, multi-token prediction), or named as a problem. config.json
and model.safetensors.index.json are enough to compare names; where weights are there, shapes and types are compared too
(only headers are read). With a layout, every rank is visited: together they must load every tensor exactly once. Exit
status 1 when something is wrong. Needs no torch.

  t1 convert check models/Qwen3.5-122B-A10B
  t1 convert check models/Qwen3.5-122B-A10B layout=gpus64 layout.expert=8
  --config-dir DIR    more layouts of your own, in DIR/layout""",
        configured=False,
    ),
    Command(
        ("show",), "inspect:show", "what a run did so far, or the transcript of one trajectory",
        """  t1 show RUN                        steps with time, speed, reward, checks, explained variance, KL, gap
  t1 show RUN --trajectory ID        tokens decoded, coloured by where they came from, with the verdict
  t1 show RUN --trajectories         ids of all trajectories
  t1 show RUN --evaluations          every evaluation as `t1 eval` reports it
  t1 show RUN --plots                write RUN/plots/*.png again""",
        configured=False,
    ),
    Command(
        ("import", "jsonl"), "import_:jsonl", "records of other people's token ids, masks and log-probs (JSON lines)",
        """\
One trajectory on each line; docs/token-streams.md describes the fields.

  t1 import jsonl FILE ... --out DIR
  --contract FILE       the sampling contract of lines that state none, as JSON: PPO needs one
  --run RUN --iteration N   instead of --out: as the rollout of that iteration, for `t1 train` by hand
  --options KEY=VALUE ...   to begin RUN with, where there is none: as `t1 run` takes them""",
        configured=False,
    ),
    Command(
        ("import", "harbor"), "import_:harbor", "records of Harbor trials or ATIF trajectories with token ids",
        """\
PATH: a trial, a directory of trials, a trial's result.json, or an ATIF file. Writes an exchange log as well, so that
`t1 audit` can show what was made of it.

  t1 import harbor PATH ... --out DIR
  --scale X             reward of one passed check, where the verifier's ctrf.json counts them (default 0.25)
  --no-routes           leave out the routes that answers of vLLM have (routed_experts)
  --contract FILE, --run RUN --iteration N, --options KEY=VALUE ...   as for `t1 import jsonl`""",
        configured=False,
    ),
    Command(
        ("inspect",), "inspect:inspect", "one record, shard or exchange log: header, spans, where the loss is",
        """\
  t1 inspect RUN/rollouts/iter_0003/x.shard.safetensors                    the records in it
  t1 inspect RUN/rollouts/iter_0003/x.shard.safetensors --trajectory ID    one of them
  t1 inspect RUN/rollouts/iter_0003/exchange.0.x.log                       what the engine was asked and answered
  --tokenizer DIR       text instead of ids, with the tokenizer.json of a model directory
  --all                 every span of a long trajectory""",
        configured=False,
    ),
    Command(
        ("audit",), "audit:audit", "does training see exactly the tokens that the sampler saw and produced?",
        """\
PATH: a run, a directory of records, a shard or a record. Compares every trajectory, as training reads it, with the log
of the exchange with the engine that lies beside the records: tokens inside and outside the loss, mask, log-probs,
turns, routes, sampling contract. Exit status 1 when anything differs, 2 when something can't be read.

  t1 audit RUN
  t1 audit RUN/rollouts/iter_0003 --report audit.json
  --report FILE         everything that was found, as JSON, with the SHA-256 of all files read
  --baseline rerender   beside it: what decoding, parsing, rendering and encoding again would have done
  --rescore N           score N trajectories of each directory again with the engine (prompt log-probabilities)
  --model DIR           model directory for the last two; default: the run's own
  --chat-format NAME    of the baseline; default: the records' own""",
        configured=False,
    ),
    Command(
        ("gap",), "gap:gap", "why do sampler and trainer disagree? Routing, number formats, temperature, weights, ids",
        """\
Scores a sample of a rollout's trajectories again, with the passes that training makes and in the run's layout: as
trained, and with one thing otherwise each time. Prints what the mean |log p trainer - log p sampler| consists of,
what each thing would change, and the tokens that differ most. RUN isn't changed, but for the report.

  t1 gap RUN
  --iteration N         of the rollout; default: the newest whose policy is still kept
  --sample N            trajectories (default 64; 0: all); --seed N chooses others
  --no-replay           compare with a training that doesn't replay: what part of its gap is routing?
  --worst N             tokens shown with their text (default 5)
  --out FILE            the report as JSON; default: RUN/gap/iter_NNNN.json

docs/gap.md explains the table.""",
        configured=False,
    ),
    Command(
        ("reward", "analyze"), "reward:analyze", "what a dense reward would see in stored trials, ours or Harbor's",
        """\
PATH: a run, a directory of records, or Harbor job or trial folders (ctrf.json, pytest.xml, reward.json, reward.txt).
How many trials without a solve made progress, reward against number of checks and length, tasks that dominate, checks
that always or never pass, and what should be looked at. docs/rewards.md explains the table.

  t1 reward analyze RUN
  t1 reward analyze jobs/2026-05-01 --out analysis.json
  --out FILE            everything, as JSON
  --scale X             reward of one passed check (default 0.25)
  --top N               rows of each list that is shown (default 10)""",
        configured=False,
    ),
    Command(
        ("plan",), "plan:plan", "memory per GPU, time and bytes of a training, and whether it fits",
        """\
By arithmetic, without GPUs, torch or a checkpoint: weights, gradients, optimizer, activations with recompute, logits,
routes, the engine's cache; time of each phase by the assumptions in plan.*; what an iteration writes; actor and critic
as phases beside both at once. Exit status 1 when something doesn't fit; the nearest layouts that do are named then.
docs/plan.md says how far to trust it.

  t1 plan experiment=ppo_122b layout=gpus64 plan.gpu=h100
  t1 plan experiment=ppo_122b plan.gpu=h200 --layouts      all shipped layouts, side by side
  --search    the nearest layouts that fit, and the fastest for as many GPUs
  --json      everything, in bytes and seconds""",
        flags=("--layouts", "--search", "--json"),
    ),
    Command(
        ("dryrun",), "dryrun:dryrun", "every rank of a layout built without GPUs: does the model fit together?",
        """\
Builds each rank's model, gradient buffers and optimizer shards on the meta device under a fake process group: shapes
without numbers, in a few processes on this machine. The ranks must hold every parameter of the model exactly once, in
checkpoints and conversion too, and as many bytes as `t1 plan` says; tokens, losses and routes of a sample batch must
each be in exactly one place; one micro-batch runs forward and backward on a rank of every stage.
Several values make several layouts. Exit status 1 when something doesn't hold. docs/dryrun.md has what it prints.

  t1 dryrun experiment=ppo_122b layout=gpus64
  t1 dryrun experiment=ppo_122b layout=gpus64,gpus96,gpus128
  --policy     the actor's model only, not the critic's
  --no-passes  build and count only""",
        flags=("--policy", "--no-passes"),
    ),
    Command(
        ("verify",), "inspect:verify", "is every file of a run still what was written?",
        """\
Reads every byte of the run and of its start model, and compares with what was recorded while it was written: manifest,
options, choice of tasks, results, records, exchange logs, values, checkpoints, exports, metrics. Logs of processes,
TensorBoard's events and plots are recorded nowhere. Exit status 1 when something differs; it is named. In the directory
of a fine-tuning or a critic's warm-up: what that left, and that the policy was left alone.

  t1 verify RUN""",
        configured=False,
    ),
    Command(
        ("compare",), "inspect:compare", "is run B better than run A? Paired bootstrap over tasks and attempts",
        """  t1 compare RUN_A RUN_B             newest evaluations of two runs
  t1 compare RUN                     first and newest evaluation of one run
  t1 compare A/evaluations/iter_0000 B/evaluations/iter_0003
  --seed N --samples N               of the bootstrap""",
        configured=False,
    ),
    Command(
        ("slurm", "submit"), "slurm:submit", "hand a run in as a Slurm job, sized by its configuration",
        """\
Asks sbatch for the nodes and GPUs that the layout needs. What `t1 run` would refuse is refused here. The job stops
cleanly before its time limit and queues itself again; docs/cluster.md tells what else it gets over.

  t1 slurm submit experiment=ppo_122b run.dir=/scratch/me/ppo 'cluster.slurm.sbatch_args=["--account=lab"]'
  --chain     rollout and training as jobs of their own, each the next one's dependency: for two partitions
              ('cluster.rollout.sbatch_args=["--partition=infer"]', and cluster.train.sbatch_args)
  --het       one heterogeneous job, with nodes of its own for each of the two
  --dry-run   print the sbatch line and hand nothing in""",
        flags=("--chain", "--het", "--dry-run"),
    ),
    Command(
        ("slurm", "status"), "slurm:status", "a run's jobs: what runs where, what failed or is held, what is next",
        """  t1 slurm status RUN""",
        configured=False,
    ),
    Command(
        ("slurm", "cancel"), "slurm:cancel", "end all jobs of a run that wait or work; what is finished is kept",
        """  t1 slurm cancel RUN""",
        configured=False,
    ),
    Command(
        ("slurm", "link"), "slurm:link", "one job of a chain; `t1 slurm submit --chain` hands it in",
        """  t1 slurm link RUN rollout|train""",
        configured=False,
    ),
    Command(
        ("patch",), "patch:patch", "patches for a Megatron checkout of your own: status, apply, revert, diff",
        """  t1 patch status --checkout DIR     what each patch is to the checkout; exit status 1 when one doesn't fit
  t1 patch diff   --checkout DIR     what the patches change, as a unified diff
  t1 patch apply  --checkout DIR     all that fit, or nothing; again: nothing more happens
  t1 patch revert --checkout DIR     the files are byte for byte what they were
  --only NAME                        this patch only; may be repeated
  --dry-run                          say what would be done, and write nothing
  --patches DIR                      declarations of your own

DIR is a Megatron-LM checkout, or a directory that holds megatron/core (site-packages). Nothing in it is run.
docs/patches.md lists the patches.""",
        configured=False,
    ),
)  # fmt: skip

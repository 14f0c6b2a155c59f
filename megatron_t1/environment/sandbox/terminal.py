"""A sandbox whose agent types into a terminal: for programs that need one (editors, pagers, debuggers, prompts).

Chosen with `env.sandbox._target_=megatron_t1.environment.sandbox.terminal.TerminalSandbox`. The agent's tool stays the
same; what it sends is typed into a tmux session of the sandbox, and what the terminal shows since then comes back.
Text is typed as it is, then Enter. Keys are named in angle brackets, as tmux names them (`<C-c>`, `<Escape>`, `<Up>`);
a text with keys in it gets no Enter of its own: `<Escape>:wq<Enter>`. An empty text only looks.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from megatron_t1.config.schema import SandboxConfig
from megatron_t1.environment.sandbox.bubblewrap import BubblewrapSandbox
from megatron_t1.environment.sandbox.interface import CommandResult, SandboxLost
from megatron_t1.environment.task import Task

COLUMNS, ROWS, HISTORY = 160, 40, 50_000
QUIET_S = 1.0  # a screen that stays the same so long, with no prompt, is a program that waits for input
POLL_S = 0.05
CONTROL_S = 10.0  # for tmux itself, beyond the time of what was typed
_NAMED = "Enter|Escape|Tab|BTab|Space|BSpace|Up|Down|Left|Right|Home|End|PageUp|PageDown|DC|IC|F[1-9]|F1[0-2]"
_KEY = re.compile(rf"<((?:[CMS]-)*(?:{_NAMED})|(?:[CMS]-)+[!-~])>")

SOCKET, STATUS = "/dev/shm/.t1-terminal", "/dev/shm/.t1-status"  # no part of the files that a sandbox keeps
TYPED_BYTES = 100_000  # a word of a command line holds no more than 128 KiB
SEPARATOR = "\x1e"
# The prompt counts the commands that ended and notes how, so that a finished one is told from one that is silent.
RC_FILE = "PROMPT_COMMAND='__t1=$?; printf \"%s %s\\n\" $((__t1_n+=1)) \"$__t1\" >|STATUS; (exit $__t1)'\nPS1='$ '\n"
# $1: microseconds to wait, then what is typed, as `key_words` has it. Says last: 0 at the prompt, 1 waiting for input,
# 2 out of time; and what the prompt noted.
TYPE = r"""
t() { tmux -S SOCKET "$@" 2>/dev/null; }
place() { t display -p '#{history_size} #{cursor_y} #{alternate_on} #{pane_current_command}'; }
t has-session || {
    rm -f STATUS
    printf '%s' "$T1_RC" > STATUS.rc
    t -f /dev/null set -g history-limit HISTORY \; set -g status off \; \
        new-session -d -x COLUMNS -y ROWS "exec bash --rcfile STATUS.rc -i" || exit 125
    for ((i = 0; i < 200; i++)); do [ -s STATUS ] && break; sleep 0.02; done
}
read -r size row _ < <(place); start=$((size + row)) before=$(<STATUS)
end=$((${EPOCHREALTIME/./} + $1)); shift
for word in "$@"; do
    case $word in l*) t send-keys -l -- "${word#l}";; *) t send-keys -- "${word#k}";; esac
done
shown= since=${EPOCHREALTIME/./} state=0
while t has-session; do
    sleep POLL
    now=${EPOCHREALTIME/./} screen=$(t capture-pane -p)
    [ "$screen" == "$shown" ] || { shown=$screen since=$now; }
    read -r _ _ _ program < <(place)
    if [ "$(<STATUS)" != "$before" ] && [ "$program" == bash ]; then ((now - since > 100000)) && break
    elif ((now - since > QUIET)); then [ "$program" == bash ] && [ $# == 0 ] || state=1; break; fi
    ((now > end)) && { state=2; break; }
done
read -r size row alternate _ < <(place)
first=$((start - ${size:-0}))
if [ "$alternate" == 1 ] || ((first >= ROWS)); then first=0; fi
t capture-pane -p -J -S $first
printf '\x1e%s %s' "$state" "$(<STATUS)"
"""


class TerminalSandbox(BubblewrapSandbox):
    """See `environment.sandbox.interface.Sandbox`. A result's exit code is that of the last command that ended at the
    prompt while the text was typed; None while a program holds the terminal."""

    def __init__(self, config: SandboxConfig, scratch_dir: str | Path | None = None, output_limit: int = 16_000):
        super().__init__(config, scratch_dir, output_limit)
        names = {"SOCKET": SOCKET, "STATUS": STATUS, "COLUMNS": COLUMNS, "ROWS": ROWS, "HISTORY": HISTORY,
                 "POLL": POLL_S, "QUIET": int(QUIET_S * 1e6)}  # fmt: skip

        def filled(script: str) -> str:
            return re.sub("|".join(names), lambda match: str(names[match[0]]), script)

        self._type, self._rc_file = filled(TYPE), filled(RC_FILE)

    async def start(self, task: Task) -> None:
        await super().start(task)
        found = await super().run("command -v tmux >/dev/null", CONTROL_S)
        if found.exit_code != 0:
            raise SandboxLost(
                "a terminal needs tmux in the base system",
                where=self.guarantees()["system"],
                remedy="make a base with it (t1 tasks base), or use BubblewrapSandbox",
            )

    async def run(self, command: str, timeout_s: float) -> CommandResult:
        if len(command.encode(errors="surrogateescape")) > TYPED_BYTES:
            return CommandResult(None, f"too much to type at once: at most {TYPED_BYTES} bytes\n")
        words = ["bash", "-c", self._type, "t1", str(int(timeout_s * 1e6)), *key_words(command)]
        script = f"T1_RC={shlex.quote(self._rc_file)} {shlex.join(words)}"
        result = await super().run(script, timeout_s + CONTROL_S)
        shown, separator, said = result.output.rpartition(SEPARATOR)
        if not separator:
            raise SandboxLost(f"the terminal did not answer (status {result.exit_code}): {result.output[-300:]}")
        state, *noted = said.split() or [""]
        shown = "\n".join(line.rstrip() for line in shown.splitlines()).rstrip() + "\n"
        exit_code = int(noted[1]) if state == "0" and len(noted) == 2 and re.fullmatch("[0-9]{1,3}", noted[1]) else None
        return CommandResult(exit_code, shown, timed_out=state == "2", omitted=result.omitted)


def key_words(text: str) -> list[str]:
    """What is typed: "lTEXT" for text as it is, "kNAME" for a key."""
    if not text:
        return []
    words, position = [], 0
    for match in _KEY.finditer(text):
        words += [f"l{text[position : match.start()]}", f"k{match[1]}"]
        position = match.end()
    words.append(f"l{text[position:]}")
    if position == 0:
        words.append("kEnter")
    return [word for word in words if word != "l"]

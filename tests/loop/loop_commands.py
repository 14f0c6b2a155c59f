"""Steps run by dummy_phase instead of vLLM and Megatron."""

from megatron_t1.loop.launcher import PhaseCommand


def dummy_command(config, step, behave=""):
    arguments = ("--run", config.run.dir, "--iteration", str(step.iteration), "--phases", ",".join(step.phases))
    return PhaseCommand("+".join(step.phases), step.kind, "dummy_phase", (*arguments, "--behave", behave))

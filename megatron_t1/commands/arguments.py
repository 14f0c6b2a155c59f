"""Command lines of the commands that Hydra doesn't configure."""

from __future__ import annotations

import argparse

from megatron_t1.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as every other command does."""

    def error(self, message: str):
        raise ConfigError(message, where=self.prog, remedy=f"`{self.prog} --help` says more")

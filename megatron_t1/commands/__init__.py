"""What the commands of `t1` do; each takes the parsed command line and returns an exit status."""

"""Tasks, closed sandboxes, the verifier and the reward."""

"""Makes small terminal tasks from a seed: for training, for evaluation, and as scripted demonstrations."""

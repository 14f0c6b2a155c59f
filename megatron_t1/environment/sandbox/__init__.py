"""Closed environments for episodes: one small interface, one native backend (bubblewrap)."""

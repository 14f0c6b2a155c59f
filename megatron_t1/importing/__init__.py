"""Other people's rollouts as records: Harbor's rollout details, ATIF trajectories, and a simple JSON-lines form."""

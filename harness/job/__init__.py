"""Job: the processes of a run and the host that they share: how ranks meet and leave, signals, heartbeats, exit codes,
the terminal, the run's folder, and the checks before training."""

"""Job: the processes of a run and the hosts that they run on: how ranks meet and leave, signals, heartbeats, exit
codes, the terminal, the run's folder, and the checks before training."""

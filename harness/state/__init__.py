"""State: what a checkpoint holds, how all ranks save and load it, which run it belongs to, and exports."""

"""What train_fsdp.py and utils.py stand on, in wings: plan over report over state over data and model over job over
flags over base. Each imports those below it only."""

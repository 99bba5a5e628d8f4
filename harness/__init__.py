"""The packages that train_fsdp.py and utils.py call: plan over report over state over data and model over job over
flags over base. Each imports those below it only."""

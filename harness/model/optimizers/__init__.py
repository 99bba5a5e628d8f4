"""Optimizers, one per file. The file's name with - for _ is a value of --optimizer; harness/flags/choices.py lists it
with the file's first sentence. A file ends with `OPTIMIZER`, an `OptimizerKind` of harness/model/optimization.py, which
imports the file."""

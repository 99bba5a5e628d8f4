"""Optimizers: each is one file, and its name with - for _ is a value of --optimizer, which harness/flags/choices.py has
with the first sentence of the file. A file ends with `OPTIMIZER`, an `OptimizerKind` of harness/model/optimization.py,
which imports it."""

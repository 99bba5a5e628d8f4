"""Optimizers: each is one file, and its name with - for _ is a value of --optimizer. A file begins with the sentence
that --help shows and ends with `OPTIMIZER`, an `OptimizerKind` of harness/model/optimization.py, which imports it."""

"""Base: what every wing stands on and what knows nothing above it: errors, text, ranks, devices, the table of GPUs,
versions, the console, and the names of a run's files. Most of it imports no torch."""

"""Base: what every wing uses, independent of all of them: errors, text, ranks, devices, the table of GPUs, versions,
the console, and the names of a run's files. Most of it imports no torch."""

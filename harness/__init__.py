"""The library that train_fsdp.py stands on, one concern a file. Imports go one way: script, `harness`, `utils`."""

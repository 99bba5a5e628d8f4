"""Flags: every flag, the command line and the files that set them, the rules between them, and the commands that the
program prints. Imports no torch, so that --help and a wrong flag answer at once."""

"""Errors that a user can correct."""

from typing import Any


class UserError(Exception):
    """Something that the user can correct: the message names the flag or file, what is wrong and what to do."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code  # the default is for unpickling, which gives the message and then sets the rest


class UnreadableError(UserError):
    """Data that cannot be read; `harness.data.faults` finds out more."""

    file: Any = None  # the file (`harness.data.storage.DataFile`) or its URL, where it is one
    record: Any = None  # the first bad record (`harness.data.records.BadRecord`), where there is one


class NoSplitError(UserError):
    """A data set that can be read has no split of a name."""

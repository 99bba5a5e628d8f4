"""Errors that a user can correct."""


class UserError(Exception):
    """Something that the user can correct: the message names the flag or file, what is wrong and what to do."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code  # the default is for unpickling, which gives the message and then sets the rest


class NoSplitError(UserError):
    """A data set that can be read has no split of a name."""

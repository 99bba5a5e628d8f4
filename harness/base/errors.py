"""Errors: those that the user can correct."""


class UserError(Exception):
    """A user's mistake. The message names the flag or file, the problem and the remedy."""

    def __init__(self, message: str, exit_code: int = 2):
        super().__init__(message)
        self.exit_code = exit_code  # unpickling passes the message only, and sets this later

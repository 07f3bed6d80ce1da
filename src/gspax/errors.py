"""The exceptions that a user can cause."""


class UserError(Exception):
    """Invalid input: one sentence that names the field, what was wanted and what was given. The exit code is 2."""


class JoinTimeoutError(UserError):
    """A process did not join in time. Trying again may help, so the exit code is 1."""

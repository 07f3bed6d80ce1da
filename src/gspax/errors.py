"""The one exception that a user can cause."""


class UserError(Exception):
    """Bad input: one clear sentence saying what was wanted, what came and where. The program prints it and exits 2."""


class AbsentError(UserError):
    """Somebody did not come: told in one sentence too, but trying again may help, so the exit code is 1."""

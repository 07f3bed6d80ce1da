"""The one exception that a user can cause."""


class UserError(Exception):
    """Bad input: one clear sentence saying what was wanted, what came and where. The program prints it and exits 2."""

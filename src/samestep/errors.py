"""The one error that a user's mistake raises; the command line turns it into exit code 2."""


class UserError(Exception):
    """A mistake in what the user asked for or in where they asked for it.

    The message is all that the user sees, so it says what is wrong, where, and what to do.
    """

"""The one exception type for mistakes that a user can mend."""


class UserError(Exception):
    """A user's mistake, told in one clear sentence that says how to mend it.

    Programs print the sentence and exit non-zero, without a traceback. Errors of ours are never
    of this type: they stay loud.
    """

"""The one exception type for mistakes that a user can mend; and how a run ends otherwise."""

EXIT_LOST = 5  # another process of the run is gone


class UserError(Exception):
    """A user's mistake, told in one clear sentence that says how to mend it.

    Programs print the sentence and exit non-zero, without a traceback. Errors of ours are never
    of this type: they stay loud.
    """


class Stopped(BaseException):
    """The run was asked to stop, and everything that it has done is saved.

    No `Exception`: it may be raised anywhere, as KeyboardInterrupt may, and whoever catches what a
    library raises must not take it for that.

    Args:
      sentence: for the user.
      code: exit code of the program.
      at_once: whether it was raised in the middle of something, so that a compiled step may still
        be running.
    """

    def __init__(self, sentence: str, code: int, at_once: bool = False):
        super().__init__(sentence)
        self.code = code
        self.at_once = at_once

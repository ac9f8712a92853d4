"""Names of the steps of a run, for callbacks that take lines of progress."""


class Phase(str):
    """The step that begins now; it ends at the next phase or at the first outer iteration.

    A `report` callback receives it like any other line. A terminal shows it with the time that it
    has taken so far.

    Example:
        report(Phase("decoding the test set"))
    """

    __slots__ = ()

"""What goes wrong between ranks. It must not know how they talk."""


class RankError(RuntimeError):
    """Another rank failed: its message is passed on, so that every rank stops alike."""

"""Collections of garbage that are short alongside many objects that stay."""

import gc


def freeze_loaded() -> None:
    """Leave what is imported and loaded out of the collections of garbage that follow."""
    gc.collect()
    # A full collection would look at every imported object, and pause all requests meanwhile.
    gc.freeze()
    # A full collection comes once the new objects are a quarter of those that the last one kept.
    # This one keeps almost none, so that the next ones come early and are short.
    gc.collect()

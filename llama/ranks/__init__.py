"""Ranks: the groups that they form, what they do together, and what ends them.

Nothing is imported here, so that a part which needs no torch (signals, errors) can be had without.
"""

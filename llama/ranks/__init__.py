"""Ranks: their process groups, their collectives, and the detection of failures.

This module imports nothing, so that parts without torch (signals, errors) can be used without it.
"""

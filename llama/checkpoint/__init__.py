"""Weights on disk: found, checked, loaded into one rank's part of a model, converted, verified."""

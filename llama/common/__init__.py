"""Checks of values, devices, memory and extras, which every part of the package uses."""

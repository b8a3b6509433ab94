"""Targets of `vitrail export`."""

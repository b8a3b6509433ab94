"""The panels of `vitrail inspect`."""

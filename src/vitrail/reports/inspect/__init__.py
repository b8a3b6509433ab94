"""The page of `vitrail inspect`."""

"""The panels of `vitrail inspect`, one a file, each with its sentences in the TOML file beside it."""

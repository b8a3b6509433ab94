"""The panels of `vitrail inspect`, one per file, each with its sentences in the TOML file beside it."""

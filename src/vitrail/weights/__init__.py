"""Models on disk: the bundle, and one file for each format of another library."""

"""What `vitrail export` writes, one file for each target."""

"""The questions of the lab, one file each."""

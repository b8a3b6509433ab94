"""`vitrail runs`: many runs side by side, with a paired test of those that were tested on the same images."""

"""The final evaluation of each training objective in the run report."""

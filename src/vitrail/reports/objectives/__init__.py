"""The final evaluations of objectives in the run report: one module for each type of result."""

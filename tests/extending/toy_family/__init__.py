"""The family `coarse`: one folder."""

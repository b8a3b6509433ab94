"""Everything that writes HTML."""

"""Reading pickles in a process without network."""

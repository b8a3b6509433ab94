"""Convert untrusted pickles to plain files in a child process without network."""

"""Face recognition: an embedding learned with a margin, verification, and galleries of people."""

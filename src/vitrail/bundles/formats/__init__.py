"""Weight formats of other libraries: reading, writing and verifying their checkpoints."""

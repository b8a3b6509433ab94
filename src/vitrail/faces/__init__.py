"""Face recognition with any bundle: embeddings, verification, a gallery of people, and calibrated thresholds."""

"""LSTM over the sequence of patches."""

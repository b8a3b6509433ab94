"""The bias lab: measure the inductive biases of each architecture on the user's images."""

"""Images: from files to the tensors that models read."""

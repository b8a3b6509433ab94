"""Remote sources of weights: the Hugging Face Hub and files at https addresses."""

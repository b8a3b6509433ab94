"""One folder for each model family."""

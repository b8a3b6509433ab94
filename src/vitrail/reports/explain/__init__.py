"""The walk-through that runs the model in the page."""

"""Looking inside a model: numbers and figures."""

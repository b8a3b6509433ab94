"""Image GPT."""

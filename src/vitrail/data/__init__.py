"""Pictures with labels."""

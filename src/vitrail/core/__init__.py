"""What every other package uses. Nothing here imports torch."""

"""What a model is, in numbers: frozen dataclasses that check themselves and count without torch."""

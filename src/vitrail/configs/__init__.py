"""Configurations: frozen dataclasses that check their values and count parameters and MACs without torch."""

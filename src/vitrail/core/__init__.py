"""Errors, files, settings and other basics that all packages use. Nothing in this package imports torch."""

"""Inspecting a model. The modules here compute arrays; `panels` shows them on one page."""

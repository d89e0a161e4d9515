"""Declarations of settings, and trees of settings by dotted keys. This room knows no part's name."""

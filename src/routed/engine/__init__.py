"""Runs on devices: compiled, advanced in batches, saved, resumed, and written down as rows."""

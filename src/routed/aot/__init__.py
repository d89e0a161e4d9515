"""Ahead of time: programs compiled for chips of another machine, their costs read from the compiled text."""

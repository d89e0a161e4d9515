"""Ahead of time: costs of a command, timed here or read from programs compiled for chips of another machine."""

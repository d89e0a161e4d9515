"""Seconds that a test waits for another process, only against hanging. A busy machine is several times slower."""

PATIENCE = 900

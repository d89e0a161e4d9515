"""Functions that exist because XLA is slow somewhere: each file names its plain twin, its measurement, and when it may
be deleted.
"""

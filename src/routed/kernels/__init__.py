"""Functions for what XLA computes slowly: each file names its plain twin, a measurement, and when to delete it."""

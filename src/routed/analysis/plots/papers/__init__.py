"""Kinds of charts that the experiments of one paper use: importing a file adds its kinds to PLOTS, as a user's file
does.
"""

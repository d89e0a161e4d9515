"""The papers as experiments: a folder for each, with the parts that its experiments alone use.

An experiment file imports the folder of its paper, which fills the tables of the core as a user's file does. Nothing in
the core imports a paper.
"""

"""Papers as experiments: a folder for each paper, with the parts that only the paper's experiments use.

Beside the folders is what several papers use.

An experiment file imports the folder of its paper. The import adds the paper's parts to the tables of the core, as a
user's file does. No module of the core imports a paper.
"""

"""The machine and its neighbours: files that appear whole, hosts that agree, progress, a parent that explains ends."""

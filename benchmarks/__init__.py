"""Claims of speed and memory, each one command; see README.md.

A regular package, as fairscale installs one of the same name that a folder without this file would
give way to.
"""

"""Claims of speed and memory, each one command; see README.md.

A regular package, because fairscale installs one of the same name, which would take precedence over
a folder without this file.
"""

"""The front-end for an nn.ModuleList that the model's forward loops over, by calls that wait.

Calls of its blocks are recorded and answered with placeholders; the call of the last one runs them
as a pipeline.
"""

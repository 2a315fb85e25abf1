"""The front-end for an nn.ModuleList that the model's forward loops over, by calls that wait."""

"""Guards against code of layers and users that a pipeline cannot run as the plain module does."""
